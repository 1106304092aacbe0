//! A plan in words: one sentence for the log, one table for people.

use std::fmt::Write as _;

use super::parts::Limit;
use super::plan::SizingPlan;

/// Parts smaller than this are left out of the sentence: they would print as 0.0 GiB.
const SENTENCE_FLOOR_BYTES: u64 = (1 << 30) / 20;

impl SizingPlan {
    /// One line: the parts in GiB, then what the cache holds.
    ///
    /// `weights 15.1, graphs 1.9, workspace 0.4, margin 1.1, KV 52.3 GiB = 4,180 blocks = 66,880
    /// tokens, 16.3 × max_model_len`
    #[must_use]
    pub fn sentence(&self) -> String {
        let parts = &self.parts;
        let always = [
            ("weights", parts.weights_bytes),
            ("graphs", parts.graphs_bytes),
            ("workspace", parts.workspace_bytes),
            ("margin", parts.margin_bytes()),
        ];
        let if_seen = [
            ("encoder cache", parts.encoder_cache_bytes),
            ("rounding", parts.rounding_bytes),
            ("other processes", parts.foreign_bytes),
            ("unused", parts.unused_bytes),
        ];
        let seen = if_seen.into_iter().filter(|(_, bytes)| *bytes >= SENTENCE_FLOOR_BYTES);
        let listed: Vec<String> = always
            .into_iter()
            .chain(seen)
            .map(|(n, bytes)| format!("{n} {}", gib(bytes)))
            .collect();
        format!(
            "{}, KV {} GiB = {} blocks = {} tokens, {:.1} × max_model_len",
            listed.join(", "),
            gib(parts.kv_bytes),
            grouped(self.blocks.0),
            grouped(self.num_tokens),
            self.concurrency(),
        )
    }

    /// One line per part with its share of the device, then what the cache holds and why it does
    /// not hold more. Ends with a line break.
    #[must_use]
    pub fn table(&self) -> String {
        let mut table = String::new();
        for (name, bytes) in self.parts.named() {
            table.push_str(&row(name, bytes, self.device_total_bytes));
        }
        table.push_str(&row("device", self.device_total_bytes, self.device_total_bytes));
        // Writing to a `String` cannot fail.
        let _ = writeln!(
            table,
            "\n{} blocks of {} tokens and {} bytes = {} tokens ({} bytes per token)",
            grouped(self.blocks.0),
            grouped(self.cache.block_size),
            grouped(self.cache.bytes_per_block),
            grouped(self.num_tokens),
            grouped(self.cache.bytes_per_token()),
        );
        let _ = writeln!(
            table,
            "{:.1} requests of max_model_len = {} tokens ({} blocks each) fit at once",
            self.concurrency(),
            grouped(self.max_model_len),
            grouped(self.blocks_per_request),
        );
        let _ = writeln!(table, "not more blocks because of {}", reason(self.limit));
        for warning in &self.warnings {
            let _ = writeln!(table, "warning: {warning}");
        }
        table
    }
}

fn row(name: &str, bytes: u64, total: u64) -> String {
    let share = 100.0 * bytes as f64 / total as f64;
    format!("{name:<16}{:>9} GiB {share:>6.1} %\n", gib(bytes))
}

fn reason(limit: Limit) -> &'static str {
    match limit {
        Limit::FreeMemory => "free memory",
        Limit::Utilization => "gpu_memory_utilization",
        Limit::Reservation => "the reservation",
        Limit::ManualSize => "kv_cache_memory_bytes",
        Limit::OtherRank => "a rank that has fewer",
    }
}

/// Bytes as GiB with one decimal.
pub(super) fn gib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 30))
}

/// A number with a comma after each third digit from the right.
pub(super) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
