//! Logistic regression by iteratively reweighted least squares, with a ridge around a prior.
//!
//! The ridge keeps unused features at the prior and makes separable data harmless.

use super::features::{Features, NUM_FEATURES};

const MAX_NUM_ITERATIONS: usize = 25;
const MAX_NUM_HALVINGS: usize = 20;
const TOLERANCE: f64 = 1e-7;

pub(super) type Coefficients = [f64; NUM_FEATURES];
type Matrix = [[f64; NUM_FEATURES]; NUM_FEATURES];

/// Features of a draft and whether it was accepted.
pub(super) type Trial = (Features, bool);

pub(super) fn logit(coefficients: &Coefficients, features: &Features) -> f64 {
    coefficients.iter().zip(features).map(|(c, &x)| c * f64::from(x)).sum()
}

/// Mean loss in nats; 0 without trials.
pub(super) fn mean_loss(trials: &[Trial], coefficients: &Coefficients) -> f64 {
    loss(trials, coefficients) / trials.len().max(1) as f64
}

/// Fits from a starting point; never returns coefficients of a larger penalised loss than it.
pub(super) fn fit(
    trials: &[Trial],
    prior: &Coefficients,
    ridge: f64,
    start: &Coefficients,
) -> (Coefficients, usize) {
    let penalised = |at: &Coefficients| {
        let distance: f64 = at.iter().zip(prior).map(|(c, p)| (c - p).powi(2)).sum();
        loss(trials, at) + ridge / 2.0 * distance
    };
    let mut current = (*start, penalised(start));
    for iteration in 0..MAX_NUM_ITERATIONS {
        let (gradient, hessian) = derivatives(trials, prior, ridge, &current.0);
        let Some(step) = solve(hessian, gradient) else { return (current.0, iteration) };
        let Some(next) = (0..MAX_NUM_HALVINGS).find_map(|halvings| {
            let share = 0.5_f64.powi(halvings.try_into().unwrap_or(i32::MAX));
            let tried: Coefficients = std::array::from_fn(|i| current.0[i] + share * step[i]);
            let loss = penalised(&tried);
            (loss <= current.1).then_some((tried, loss))
        }) else {
            return (current.0, iteration);
        };
        let gained = current.1 - next.1;
        current = next;
        if gained <= TOLERANCE * (1.0 + current.1) {
            return (current.0, iteration + 1);
        }
    }
    (current.0, MAX_NUM_ITERATIONS)
}

fn loss(trials: &[Trial], coefficients: &Coefficients) -> f64 {
    let losses = trials.iter().map(|(features, is_accepted)| {
        let z = logit(coefficients, features);
        z.max(0.0) + (-z.abs()).exp().ln_1p() - if *is_accepted { z } else { 0.0 }
    });
    losses.sum()
}

fn derivatives(
    trials: &[Trial],
    prior: &Coefficients,
    ridge: f64,
    at: &Coefficients,
) -> (Coefficients, Matrix) {
    let mut gradient: Coefficients = std::array::from_fn(|i| ridge * (prior[i] - at[i]));
    let mut hessian: Matrix = [[0.0; NUM_FEATURES]; NUM_FEATURES];
    for (features, is_accepted) in trials {
        let p = crate::calibration::sigmoid(logit(at, features));
        let (miss, weight) = (f64::from(u8::from(*is_accepted)) - p, p * (1.0 - p));
        for i in 0..NUM_FEATURES {
            let x = f64::from(features[i]);
            gradient[i] += x * miss;
            for j in 0..=i {
                hessian[i][j] += weight * x * f64::from(features[j]);
            }
        }
    }
    (0..NUM_FEATURES).for_each(|i| hessian[i][i] += ridge);
    (gradient, hessian)
}

/// Solves with a symmetric positive matrix of which the lower half is given (Cholesky).
fn solve(mut matrix: Matrix, mut vector: Coefficients) -> Option<Coefficients> {
    for i in 0..NUM_FEATURES {
        for j in 0..=i {
            let inner: f64 = (0..j).map(|k| matrix[i][k] * matrix[j][k]).sum();
            let rest = matrix[i][j] - inner;
            if i == j {
                if rest.is_nan() || rest <= 0.0 {
                    return None;
                }
                matrix[i][i] = rest.sqrt();
            } else {
                matrix[i][j] = rest / matrix[j][j];
            }
        }
    }
    for i in 0..NUM_FEATURES {
        let known: f64 = (0..i).map(|k| matrix[i][k] * vector[k]).sum();
        vector[i] = (vector[i] - known) / matrix[i][i];
    }
    for i in (0..NUM_FEATURES).rev() {
        let known: f64 = (i + 1..NUM_FEATURES).map(|k| matrix[k][i] * vector[k]).sum();
        vector[i] = (vector[i] - known) / matrix[i][i];
    }
    vector.iter().all(|value| value.is_finite()).then_some(vector)
}
