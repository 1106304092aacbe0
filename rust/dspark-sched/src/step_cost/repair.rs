//! Monotone repair: the closest never falling values (least squares, pool adjacent violators).
//!
//! A running maximum, as vLLM uses, lets one slow outlier lift everything after it; pooling shares
//! the error among the knots that contradict each other.

/// Returns the never falling values closest to `values` in least squares.
///
/// ```
/// let repaired = dspark_sched::step_cost::repaired(&[1.0, 4.0, 2.0, 5.0]);
/// assert_eq!(repaired, [1.0, 3.0, 3.0, 5.0]);
/// ```
#[must_use]
pub fn repaired(values: &[f64]) -> Vec<f64> {
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
    pools.iter().flat_map(|&pool| std::iter::repeat_n(mean(pool), pool.1)).collect()
}

fn mean((sum, count): (f64, usize)) -> f64 {
    sum / count as f64
}
