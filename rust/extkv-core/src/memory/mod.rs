//! Growable memory over a driver, in safe Rust.
//!
//! A [`GrowableBuffer`] is one reservation divided into segments whose committed prefixes grow in
//! lockstep. Growth of one or of several buffers is one transaction ([`grow_together`]): it
//! happens whole or not at all. Views own the memory they show ([`BufferView`]).

mod buffer;
mod chunking;
mod granules;
mod group;
mod lifetime;
mod physical;
mod reservation;
mod segments;
mod stats;
mod transaction;

pub use buffer::{BufferOptions, GrowableBuffer};
pub use chunking::{ChunkPolicy, ChunkSize, Growth};
pub use granules::{GranuleRange, GranuleSet};
pub use group::{PreparedGrowth, grow_together, prepare_together, shrink_together};
pub use lifetime::{BufferView, Freeing};
pub use segments::{Segment, SegmentLayout};
pub use stats::BufferStats;
