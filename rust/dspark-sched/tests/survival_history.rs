//! Records of earlier steps: delay, occupants, refusals.

#![allow(clippy::unwrap_used)]

mod speculation;

use dspark_sched::survival_history::{SlotRow, SurvivalHistory};
use dspark_sched::verify_plan::PlanError;
use dspark_sched::{Generation, SlotId, StepId};
use proptest::collection::vec;
use proptest::prelude::*;
use speculation::slot_rows;

fn row(slot: u32, generation: u32) -> SlotRow {
    SlotRow { slot_id: SlotId(slot), generation: Generation(generation) }
}

fn read(history: &mut SurvivalHistory, step: u64, rows: &[SlotRow]) -> (Vec<f32>, u32) {
    let mut survival = vec![0.0; rows.len() * 2];
    let num_unknown = history.read(StepId(step), rows, &mut survival).unwrap();
    (survival, num_unknown)
}

#[test]
fn a_step_reads_what_is_at_least_lag_steps_old() {
    let rows = slot_rows(1, 1);
    let mut history = SurvivalHistory::new(2, 2, 2).unwrap();
    history.record(StepId(1), &rows, &[0.9, 0.1]).unwrap();
    assert_eq!(read(&mut history, 2, &rows), (vec![1.0, 1.0], 1));
    history.record(StepId(2), &rows, &[0.8, 0.2]).unwrap();
    assert_eq!(read(&mut history, 3, &rows), (vec![0.9, 0.1], 0));
    history.record(StepId(3), &rows, &[0.7, 0.3]).unwrap();
    assert_eq!(read(&mut history, 4, &rows), (vec![0.8, 0.2], 0));
    // Steps that did not draft leave the newest old enough record.
    assert_eq!(read(&mut history, 9, &rows), (vec![0.7, 0.3], 0));
}

#[test]
fn a_new_occupant_never_reads_the_one_before() {
    let mut history = SurvivalHistory::new(2, 2, 1).unwrap();
    history.record(StepId(1), &[row(0, 1), row(1, 5)], &[0.1, 0.1, 0.5, 0.4]).unwrap();
    let (survival, num_unknown) = read(&mut history, 2, &[row(1, 5), row(0, 2)]);
    assert_eq!((survival, num_unknown), (vec![0.5, 0.4, 1.0, 1.0], 1));
    history.record(StepId(2), &[row(0, 2)], &[0.2, 0.2]).unwrap();
    assert_eq!(read(&mut history, 3, &[row(0, 2)]).0, [0.2, 0.2]);
    assert_eq!(read(&mut history, 3, &[row(0, 1)]).0, [1.0, 1.0]);
}

#[test]
fn what_cannot_be_is_refused() {
    let new = |slots, drafts, lag| SurvivalHistory::new(slots, drafts, lag).err();
    assert_eq!(new(2, 2, 0), Some(PlanError::ZeroLag));
    assert_eq!(new(0, 2, 1), Some(PlanError::Zero { name: "num_slots" }));
    assert_eq!(new(2, 0, 1), Some(PlanError::Zero { name: "num_drafts" }));
    assert_eq!(new(2, 2, 17), Some(PlanError::TooMany { name: "lag", asked: 17, limit: 16 }));
    let mut history = SurvivalHistory::new(2, 2, 1).unwrap();
    let error = history.record(StepId(1), &[row(2, 1)], &[0.5, 0.5]);
    assert_eq!(error, Err(PlanError::UnknownSlot { slot_id: SlotId(2), num_slots: 2 }));
    let error = history.record(StepId(1), &[row(0, 1)], &[0.5]);
    assert_eq!(error, Err(PlanError::WrongLength { name: "survival", found: 1, expected: 2 }));
    history.record(StepId(1), &[row(0, 1)], &[0.5, 0.5]).unwrap();
    let error = history.record(StepId(1), &[row(0, 1)], &[0.5, 0.5]);
    assert_eq!(error, Err(PlanError::StepOrder { found: StepId(1), last: StepId(1) }));
}

proptest! {
    /// Against a list of all records ever made.
    #[test]
    fn a_history_equals_a_search_of_all_records(
        lag in 1_u32..4,
        steps in vec((1_u64..4, vec((0_u32..3, 0_u32..2), 0..3)), 1..30),
    ) {
        let mut history = SurvivalHistory::new(3, 1, lag).unwrap();
        let mut records: Vec<(u64, SlotRow, f32)> = Vec::new();
        let mut step_id = 0;
        for (gap, rows) in steps {
            step_id += gap;
            let mut rows: Vec<SlotRow> = rows.iter().map(|&(s, g)| row(s, g)).collect();
            rows.sort_by_key(|row| row.slot_id);
            rows.dedup_by_key(|row| row.slot_id);
            let mut found = vec![0.0; rows.len()];
            history.read(StepId(step_id), &rows, &mut found).unwrap();
            for (row, found) in rows.iter().zip(found) {
                let last = records.iter().rev().find(|record| {
                    record.0 + u64::from(lag) <= step_id && record.1.slot_id == row.slot_id
                });
                let expected = last.filter(|record| record.1 == *row).map_or(1.0, |r| r.2);
                prop_assert_eq!(found, expected);
            }
            #[allow(clippy::cast_possible_truncation)]
            let survival: Vec<f32> = rows.iter().map(|_| 1.0 / (step_id + 1) as f32).collect();
            history.record(StepId(step_id), &rows, &survival).unwrap();
            records.extend(rows.iter().zip(survival).map(|(row, a)| (step_id, *row, a)));
        }
    }
}
