//! Linear least squares with no coefficient below 0, and without that bound.
//!
//! The bounded form is Lawson and Hanson's active set method: coefficients enter one by one, the
//! steepest first, and leave where the best values of those that entered would be negative. It ends
//! at the one optimum, since the problem is convex. Problems are small: some dozens of coefficients.

/// A share of a coefficient that counts as 0.
const TOLERANCE: f64 = 1e-12;
/// The method needs about as many rounds as coefficients.
const MAX_NUM_ROUNDS_PER_COEFFICIENT: usize = 10;

/// Weighted squares to minimise, with coefficients scaled so that their columns have length 1.
pub(super) struct NormalEquations {
    gram: Vec<Vec<f64>>,
    moments: Vec<f64>,
    scales: Vec<f64>,
}

impl NormalEquations {
    /// Equations of `rows` `[n, k]` that shall make `values` `[n]`, with `weights` `[n]` of squared
    /// errors. `ridge` `[k]` draws each coefficient to 0, as a share of what its column says.
    pub(super) fn new(rows: &[Vec<f64>], values: &[f64], weights: &[f64], ridge: &[f64]) -> Self {
        let num = ridge.len();
        let mut gram = vec![vec![0.0; num]; num];
        let mut moments = vec![0.0; num];
        for ((row, value), weight) in rows.iter().zip(values).zip(weights) {
            for index in 0..num {
                moments[index] += weight * row[index] * value;
                for (cell, other) in gram[index].iter_mut().zip(row) {
                    *cell += weight * row[index] * other;
                }
            }
        }
        let length = |index: usize| f64::sqrt(gram[index][index]);
        let scales: Vec<f64> =
            (0..num).map(|index| if length(index) > 0.0 { length(index) } else { 1.0 }).collect();
        for (index, row) in gram.iter_mut().enumerate() {
            moments[index] /= scales[index];
            row.iter_mut().zip(&scales).for_each(|(cell, scale)| *cell /= scale * scales[index]);
            // A column without an entry keeps its coefficient at 0.
            row[index] = row[index].max(f64::from(row[index] == 0.0)) + ridge[index];
        }
        Self { gram, moments, scales }
    }

    /// The coefficients `[k]` of least squares.
    pub(super) fn solution(&self) -> Vec<f64> {
        let all: Vec<usize> = (0..self.moments.len()).collect();
        self.unscaled(&self.solved(&all))
    }

    /// The coefficients `[k]` of least squares among those that are not negative.
    pub(super) fn non_negative_solution(&self) -> Vec<f64> {
        let num = self.moments.len();
        let largest = self.moments.iter().fold(0.0_f64, |most, moment| most.max(moment.abs()));
        let (mut entered, mut found) = (Vec::new(), vec![0.0; num]);
        for _ in 0..MAX_NUM_ROUNDS_PER_COEFFICIENT * num {
            let Some((index, slope)) = self.steepest(&entered, &found) else { break };
            if slope <= TOLERANCE * largest {
                break;
            }
            entered.push(index);
            self.settle(&mut entered, &mut found);
        }
        self.unscaled(&found)
    }

    /// The coefficient outside that lowers the squares fastest; the first of equal ones.
    fn steepest(&self, entered: &[usize], found: &[f64]) -> Option<(usize, f64)> {
        let outside = (0..found.len()).filter(|index| !entered.contains(index));
        outside.map(|index| (index, self.moments[index] - dot(&self.gram[index], found))).fold(
            None,
            |best, next| match best {
                Some((_, slope)) if slope >= next.1 => best,
                _ => Some(next),
            },
        )
    }

    /// Goes to the best values of those that entered, and drops each that reaches 0 on the way.
    fn settle(&self, entered: &mut Vec<usize>, found: &mut [f64]) {
        while !entered.is_empty() {
            let target = self.solved(entered);
            let reach = |&index: &usize| match target[index] {
                to if to > 0.0 => 1.0,
                to if found[index] > to => found[index] / (found[index] - to),
                _ => 0.0,
            };
            let share = entered.iter().map(reach).fold(1.0, f64::min);
            for &index in entered.iter() {
                found[index] += share * (target[index] - found[index]);
            }
            let most = found.iter().copied().fold(0.0, f64::max);
            let num_before = entered.len();
            entered.retain(|&index| target[index] > 0.0 || found[index] > TOLERANCE * most);
            if entered.len() == num_before {
                break;
            }
            let is_out = |index: &usize| !entered.contains(index);
            (0..found.len()).filter(is_out).for_each(|index| found[index] = 0.0);
        }
    }

    /// The best values of some coefficients, the others being 0, by Cholesky's factors.
    fn solved(&self, chosen: &[usize]) -> Vec<f64> {
        let num = chosen.len();
        let mut lower = vec![vec![0.0; num]; num];
        let mut half = vec![0.0; num];
        for row in 0..num {
            for column in 0..=row {
                let rest = self.gram[chosen[row]][chosen[column]]
                    - dot(&lower[row][..column], &lower[column][..column]);
                lower[row][column] = if row == column {
                    rest.max(TOLERANCE).sqrt()
                } else {
                    rest / lower[column][column]
                };
            }
            let rest = self.moments[chosen[row]] - dot(&lower[row][..row], &half[..row]);
            half[row] = rest / lower[row][row];
        }
        let mut found = vec![0.0; self.moments.len()];
        for row in (0..num).rev() {
            let known: f64 =
                (row + 1..num).map(|later| lower[later][row] * found[chosen[later]]).sum();
            found[chosen[row]] = (half[row] - known) / lower[row][row];
        }
        found
    }

    fn unscaled(&self, found: &[f64]) -> Vec<f64> {
        found.iter().zip(&self.scales).map(|(found, scale)| found / scale).collect()
    }
}

pub(super) fn dot(left: &[f64], right: &[f64]) -> f64 {
    left.iter().zip(right).map(|(left, right)| left * right).sum()
}

#[cfg(test)]
mod tests {
    use super::{NormalEquations, dot};
    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        /// Karush, Kuhn and Tucker: no coefficient is negative, those above 0 have no slope left,
        /// and those at 0 would only get worse.
        #[test]
        fn a_bounded_solution_is_the_best_one(
            rows in vec(vec(-1.0..1.0_f64, 6), 3..20),
            values in vec(-1.0..1.0_f64, 20),
            weights in vec(0.1..2.0_f64, 20),
        ) {
            let equations = NormalEquations::new(&rows, &values, &weights, &[1e-10; 6]);
            let found = equations.non_negative_solution();
            prop_assert!(found.iter().all(|&found| found >= 0.0));
            for index in 0..found.len() {
                let slope: f64 = rows
                    .iter()
                    .zip(&values)
                    .zip(&weights)
                    .map(|((row, value), weight)| {
                        weight * row[index] * (value - dot(row, &found))
                    })
                    .sum();
                prop_assert!(slope < 1e-6, "{} {}", index, slope);
                prop_assert!(found[index] == 0.0 || slope > -1e-6, "{} {}", index, slope);
            }
        }

        #[test]
        fn a_free_solution_finds_what_made_the_values(
            rows in vec(vec(-1.0..1.0_f64, 4), 30),
            truth in vec(-2.0..2.0_f64, 4),
        ) {
            let values: Vec<f64> = rows.iter().map(|row| dot(row, &truth)).collect();
            let equations = NormalEquations::new(&rows, &values, &[1.0; 30], &[1e-12; 4]);
            for (found, truth) in equations.solution().iter().zip(&truth) {
                prop_assert!((found - truth).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn equal_columns_and_empty_ones_do_no_harm() {
        let rows = vec![vec![1.0, 1.0, 0.0], vec![2.0, 2.0, 0.0]];
        let equations = NormalEquations::new(&rows, &[3.0, 6.0], &[1.0, 1.0], &[1e-10; 3]);
        for found in [equations.solution(), equations.non_negative_solution()] {
            assert!((found[0] + found[1] - 3.0).abs() < 1e-6, "{found:?}");
            assert_eq!(found[2], 0.0);
        }
    }
}
