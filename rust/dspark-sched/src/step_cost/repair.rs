//! Monotone repair: the closest never falling values (least squares, pool adjacent violators).
//!
//! A running maximum, as vLLM uses, lets one slow outlier lift everything after it; pooling shares
//! the error among the knots that contradict each other.

/// Repaired values and what the repair did.
#[derive(Debug, Clone, PartialEq)]
pub struct Repaired {
    /// Never falling values, as many as given.
    pub values: Vec<f64>,
    /// Largest absolute change.
    pub largest_move: f64,
    /// Index of the value changed most; 0 where nothing changed.
    pub largest_move_at: usize,
}

/// Returns the never falling values closest to `values` in least squares.
///
/// ```
/// let repaired = dspark_sched::step_cost::repaired(&[1.0, 4.0, 2.0, 5.0]);
/// assert_eq!(repaired.values, [1.0, 3.0, 3.0, 5.0]);
/// assert_eq!((repaired.largest_move, repaired.largest_move_at), (1.0, 1));
/// ```
#[must_use]
pub fn repaired(values: &[f64]) -> Repaired {
    let mut pools: Vec<(f64, usize)> = Vec::with_capacity(values.len());
    for &value in values {
        pools.push((value, 1));
        while let [.., before, last] = pools.as_slice()
            && mean(*before) > mean(*last)
        {
            let merged = (before.0 + last.0, before.1 + last.1);
            pools.truncate(pools.len() - 2);
            pools.push(merged);
        }
    }
    let fixed: Vec<f64> =
        pools.iter().flat_map(|&pool| std::iter::repeat_n(mean(pool), pool.1)).collect();
    let moves = values.iter().zip(&fixed).map(|(value, fixed)| (value - fixed).abs());
    let (largest_move_at, largest_move) = moves
        .enumerate()
        .fold((0, 0.0), |best, (index, moved)| if moved > best.1 { (index, moved) } else { best });
    Repaired { values: fixed, largest_move, largest_move_at }
}

fn mean((sum, count): (f64, usize)) -> f64 {
    sum / count as f64
}
