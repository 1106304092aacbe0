//! Rates of acceptance: what they count, per position and request, and what is refused.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, clippy::cast_sign_loss)]

mod speculation;

use dspark_sched::estimator::{AcceptanceRates, EstimatorError};
use dspark_sched::ids::{Generation, SlotId};
use dspark_sched::survival_history::SlotRow;
use speculation::{Random, slot_rows};

const NUM_DRAFTS: usize = 3;

fn confidences(rates: &AcceptanceRates, rows: &[SlotRow]) -> Vec<f32> {
    let mut out = vec![0.0; rows.len() * NUM_DRAFTS];
    rates.confidences(rows, &mut out).unwrap();
    out
}

#[test]
fn before_any_data_drafts_are_likely() {
    let rates = AcceptanceRates::new(4, NUM_DRAFTS).unwrap();
    assert_eq!(rates.rates(), [0.8; NUM_DRAFTS]);
    assert_eq!(confidences(&rates, &slot_rows(2, 1)), [0.8; 2 * NUM_DRAFTS]);
    assert_eq!(confidences(&rates, &[]), [0.0_f32; 0]);
}

#[test]
fn one_step_counts_what_was_tried() {
    let mut rates = AcceptanceRates::new(4, NUM_DRAFTS).unwrap();
    // Tried: 2 of the first (of 3 verified, 1 accepted), 2 of the second, none of the third.
    rates.observe(&slot_rows(3, 1), &[3, 2, 0], &[1, 2, 0]).unwrap();
    let position = |tried: f64, accepted: f64| (16.0 * 0.8 + accepted) / (16.0 + tried);
    let expected = [position(2.0, 2.0), position(2.0, 1.0), position(0.0, 0.0)];
    for (found, expected) in rates.rates().iter().zip(expected) {
        assert!((found - expected).abs() < 1e-12, "{found} {expected}");
    }
    // The first accepted 1 of 1.6 promised, the second 2 of 1.6, the third was not tried.
    let found = confidences(&rates, &slot_rows(3, 1));
    for (row, scale) in [5.0 / 5.6, 6.0 / 5.6, 1.0].into_iter().enumerate() {
        let expected = (scale * rates.rates()[0]).min(1.0);
        assert!((f64::from(found[row * NUM_DRAFTS]) - expected).abs() < 1e-6);
    }
}

#[test]
fn a_step_without_windows_changes_nothing() {
    let mut rates = AcceptanceRates::new(2, NUM_DRAFTS).unwrap();
    rates.observe(&slot_rows(2, 1), &[3, 3], &[0, 3]).unwrap();
    let (before, of_rows) = (rates.rates().to_vec(), confidences(&rates, &slot_rows(2, 1)));
    rates.observe(&slot_rows(2, 1), &[0, 0], &[0, 0]).unwrap();
    assert_eq!(rates.rates(), before);
    assert_eq!(confidences(&rates, &slot_rows(2, 1)), of_rows);
}

#[test]
fn the_next_occupant_of_a_slot_starts_anew() {
    let mut rates = AcceptanceRates::new(1, NUM_DRAFTS).unwrap();
    (0..20).for_each(|_| rates.observe(&slot_rows(1, 1), &[3], &[0]).unwrap());
    let next = confidences(&rates, &slot_rows(1, 2));
    assert!((f64::from(next[0]) - rates.rates()[0]).abs() < 1e-6);
    assert!(confidences(&rates, &slot_rows(1, 1))[0] < next[0]);
    rates.observe(&slot_rows(1, 2), &[3], &[3]).unwrap();
    assert!(confidences(&rates, &slot_rows(1, 2))[0] > next[0]);
}

#[test]
fn trimmed_windows_do_not_bias_the_rates() {
    let truth = [0.9, 0.7, 0.5];
    let mut random = Random(5);
    let mut rates = AcceptanceRates::new(64, NUM_DRAFTS).unwrap();
    for _ in 0..500 {
        let verified: Vec<u32> = (0..64).map(|_| (random.uniform() * 4.0) as u32).collect();
        let accepts = |&len: &u32| {
            truth.iter().take(len as usize).take_while(|&&rate| random.uniform() < rate).count()
        };
        let accepted: Vec<u32> = verified.iter().map(accepts).map(|count| count as u32).collect();
        rates.observe(&slot_rows(64, 1), &verified, &accepted).unwrap();
    }
    for (found, expected) in rates.rates().iter().zip(truth) {
        assert!((found - expected).abs() < 0.04, "{found} {expected}");
    }
}

#[test]
fn what_cannot_be_is_refused_and_counts_nothing() {
    let sizes = [(0, 1), (1, 0), (1 << 21, 1), (1, 1 << 13)];
    for (num_slots, num_drafts) in sizes {
        let error = AcceptanceRates::new(num_slots, num_drafts).unwrap_err();
        assert!(matches!(error, EstimatorError::OutOfRange { .. }), "{error}");
    }
    let mut rates = AcceptanceRates::new(2, NUM_DRAFTS).unwrap();
    let rows = slot_rows(2, 1);
    let far = [SlotRow { slot_id: SlotId(2), generation: Generation(1) }];
    let unknown = EstimatorError::UnknownSlot { slot_id: SlotId(2), num_slots: 2 };
    assert_eq!(rates.confidences(&far, &mut [0.0; NUM_DRAFTS]), Err(unknown.clone()));
    assert_eq!(rates.observe(&far, &[1], &[1]), Err(unknown));
    let wrong = |name, found, expected| EstimatorError::WrongLength { name, found, expected };
    assert_eq!(rates.confidences(&rows, &mut [0.0; 5]), Err(wrong("confidences", 5, 6)));
    assert_eq!(rates.observe(&rows, &[1], &[1, 1]), Err(wrong("num_verified", 1, 2)));
    assert_eq!(rates.observe(&rows, &[1, 1], &[1]), Err(wrong("num_accepted", 1, 2)));
    for (verified, accepted) in [([1, 1], [1, 2]), ([1, 4], [0, 0])] {
        let error = rates.observe(&rows, &verified, &accepted).unwrap_err();
        assert!(matches!(error, EstimatorError::AcceptedPastWindow { row: 1, .. }), "{error}");
    }
    assert_eq!(rates.rates(), [0.8; NUM_DRAFTS]);
}
