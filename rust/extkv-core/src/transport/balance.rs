//! Which engine gets the next request.

/// How much an engine has to do.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct EngineLoadEstimate {
    /// Requests that this client has there.
    pub(super) num_in_flight: usize,
    /// Requests that wait there, as it said last.
    pub(super) num_waiting: i64,
    /// Requests that run there, as it said last.
    pub(super) num_running: i64,
    /// Used share of its KV cache, as it said last.
    pub(super) kv_cache_usage: f64,
}

/// Cost of sending the next request there. The formula is that of vLLM's data-parallel client:
/// `max(num_clients * in flight, waiting + running) + 6 * waiting * max(0, usage - 0.5)`.
fn score(load: &EngineLoadEstimate, num_clients: usize) -> f64 {
    let ours = as_f64(load.num_in_flight) * as_f64(num_clients.max(1));
    let reported = count(load.num_waiting) + count(load.num_running);
    let pressure = (load.kv_cache_usage - 0.5).max(0.0);
    ours.max(reported) + 6.0 * count(load.num_waiting) * pressure
}

#[allow(clippy::cast_precision_loss)]
fn as_f64(number: usize) -> f64 {
    number as f64
}

#[allow(clippy::cast_precision_loss)]
fn count(number: i64) -> f64 {
    number.max(0) as f64
}

/// The least loaded of the engines that may be used; of equal ones the first from `start` on, so
/// that a rising `start` takes turns. None if there is none.
pub(super) fn choose(
    loads: &[Option<EngineLoadEstimate>],
    num_clients: usize,
    start: usize,
) -> Option<usize> {
    let mut best: Option<(f64, usize)> = None;
    for place in 0..loads.len() {
        let index = (start % loads.len() + place) % loads.len();
        let Some(load) = &loads[index] else { continue };
        let cost = score(load, num_clients);
        if best.is_none_or(|(least, _)| cost < least) {
            best = Some((cost, index));
        }
    }
    best.map(|(_, index)| index)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn load(num_in_flight: usize, num_waiting: i64, num_running: i64) -> EngineLoadEstimate {
        EngineLoadEstimate { num_in_flight, num_waiting, num_running, kv_cache_usage: 0.0 }
    }

    #[test]
    fn the_least_loaded_is_chosen_and_equal_ones_take_turns() {
        let loads = [Some(load(2, 0, 0)), Some(load(1, 0, 0)), Some(load(1, 0, 0))];
        assert_eq!(choose(&loads, 1, 0), Some(1));
        assert_eq!(choose(&loads, 1, 2), Some(2));
        assert_eq!(choose(&loads, 1, usize::MAX), Some(1));
    }

    #[test]
    fn other_clients_requests_count() {
        let loads = [Some(load(0, 0, 3)), Some(load(1, 0, 0))];
        assert_eq!(choose(&loads, 1, 0), Some(1));
        assert_eq!(choose(&loads, 4, 0), Some(0));
    }

    #[test]
    fn a_full_cache_counts_for_those_who_wait() {
        let full = EngineLoadEstimate { kv_cache_usage: 1.0, ..load(0, 1, 0) };
        let loads = [Some(full), Some(load(0, 1, 2))];
        assert_eq!(choose(&loads, 1, 0), Some(1));
    }

    #[test]
    fn dead_engines_are_passed_over() {
        assert_eq!(choose(&[None, Some(load(9, 9, 9))], 1, 0), Some(1));
        assert_eq!(choose(&[None, None], 1, 0), None);
        assert_eq!(choose(&[], 1, 0), None);
    }

    proptest! {
        #[test]
        fn the_choice_is_the_cheapest(
            counts in prop::collection::vec((0usize..9, 0i64..9, 0i64..9, -1.0f64..2.0), 1..9),
            start in any::<usize>(),
        ) {
            let loads: Vec<_> = counts
                .iter()
                .map(|&(a, b, c, usage)| {
                    Some(EngineLoadEstimate { kv_cache_usage: usage, ..load(a, b, c) })
                })
                .collect();
            let chosen = choose(&loads, 2, start).unwrap();
            let cost = |index: usize| score(&loads[index].unwrap(), 2);
            for index in 0..loads.len() {
                prop_assert!(cost(chosen) <= cost(index));
            }
        }
    }
}
