//! Which layer lives in which buffer, and the segments that a buffer needs.

use std::collections::HashMap;

use super::error::PlanError;
use super::form::{Form, SegmentRun};
use super::layer::{Layer, Shared};
use super::{BufferPlan, SegmentPlan};
use crate::kv::checked::{add, mul};
use crate::kv::error::LayoutError;
use crate::kv::spec::NumBlocks;

/// A buffer before its number of blocks is known. Layers are named by their index in the plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Buffer {
    /// The form of the layer that came first; a stack holds several of it.
    form: Form,
    num_layers: u64,
    members: Vec<usize>,
    /// Layers by the block table that their requests use: those of one group hold the same block
    /// ids, those of different groups never do.
    pub(super) groups: Vec<Vec<usize>>,
}

/// Where a layer lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Home {
    pub(super) buffer: usize,
    group: usize,
    /// Its number in a stack; 0 elsewhere.
    slice: u64,
}

/// All layers at home.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Homes {
    pub(super) buffers: Vec<Buffer>,
    /// One per layer.
    pub(super) homes: Vec<Home>,
    /// One per layer.
    pub(super) forms: Vec<Form>,
}

impl Homes {
    /// Gives every layer a home: its own buffer, the stack of its kind, or that of the layer it
    /// shares with.
    pub(super) fn new(layers: &[Layer]) -> Result<Self, PlanError> {
        if layers.is_empty() {
            return Err(PlanError::NoLayers);
        }
        let mut all = Self { buffers: Vec::new(), homes: Vec::new(), forms: Vec::new() };
        let mut by_name: HashMap<&str, usize> = HashMap::new();
        for (index, layer) in layers.iter().enumerate() {
            let form = Form::of(layer)?;
            let home = match &layer.shared {
                None => all.settle(index, &form),
                Some(shared) => {
                    let owner = by_name.get(shared.with()).copied();
                    all.settle_with(index, layer, &form, shared, owner)?
                }
            };
            if by_name.insert(&layer.name, index).is_some() {
                return Err(PlanError::DuplicateLayer { layer: layer.name.clone() });
            }
            all.homes.push(home);
            all.forms.push(form);
        }
        Ok(all)
    }

    fn settle(&mut self, index: usize, form: &Form) -> Home {
        if form.is_stack() {
            let stacks = self.buffers.iter_mut().enumerate();
            if let Some((buffer, stack)) = stacks.into_iter().find(|(_, b)| b.form == *form) {
                let home = Home { buffer, group: 0, slice: stack.num_layers };
                stack.num_layers += 1;
                stack.admit(index, home.group);
                return home;
            }
        }
        self.buffers.push(Buffer {
            form: form.clone(),
            num_layers: 1,
            members: vec![index],
            groups: vec![vec![index]],
        });
        Home { buffer: self.buffers.len() - 1, group: 0, slice: 0 }
    }

    fn settle_with(
        &mut self,
        index: usize,
        layer: &Layer,
        form: &Form,
        shared: &Shared,
        owner: Option<usize>,
    ) -> Result<Home, PlanError> {
        let (name, with) = (layer.name.clone(), shared.with().to_owned());
        let found = owner.and_then(|owner| Some((self.forms.get(owner)?, *self.homes.get(owner)?)));
        let Some((owner_form, mut home)) = found else {
            return Err(PlanError::UnknownSharedLayer { layer: name, with });
        };
        check_sharing(shared, (&name, form), (&with, owner_form))?;
        if let Some(buffer) = self.buffers.get_mut(home.buffer) {
            if matches!(shared, Shared::Pool { .. }) {
                home.group = buffer.groups.len();
                buffer.groups.push(Vec::new());
            }
            buffer.admit(index, home.group);
        }
        Ok(home)
    }

    /// A layer's number in its stack, and how many layers the stack has.
    pub(super) fn place_of(&self, home: Home) -> (u64, u64) {
        let num_layers = self.buffers.get(home.buffer).map_or(1, |buffer| buffer.num_layers);
        (home.slice, num_layers)
    }
}

/// Refuses memory of `owner` that `layer` cannot use; each with its name.
fn check_sharing(
    shared: &Shared,
    (layer, form): (&str, &Form),
    (owner, owner_form): (&str, &Form),
) -> Result<(), PlanError> {
    let (layer, other) = (layer.to_owned(), owner.to_owned());
    let (segments, other_segments) = (form.segment_runs(1)?, owner_form.segment_runs(1)?);
    match shared {
        Shared::Blocks { .. } if form == owner_form => Ok(()),
        Shared::Blocks { .. } => {
            let (layer_bytes, other_bytes) = (total(&segments), total(&other_segments));
            Err(PlanError::SharedBlocksDiffer { layer, layer_bytes, other, other_bytes })
        }
        Shared::Pool { .. } if form.is_stack() || owner_form.is_stack() => {
            Err(PlanError::StackHasNoPool { layer, other })
        }
        Shared::Pool { .. } if segments == other_segments => Ok(()),
        Shared::Pool { .. } => {
            Err(PlanError::PoolsDiffer { layer, segments, other, other_segments })
        }
    }
}

fn total(runs: &[SegmentRun]) -> u64 {
    // Cannot overflow: layouts check their bytes per block, and so do layers their sum.
    runs.iter().fold(0, |sum, (count, bytes)| sum.saturating_add(count.saturating_mul(*bytes)))
}

impl Buffer {
    fn admit(&mut self, index: usize, group: usize) {
        self.members.push(index);
        if let Some(group) = self.groups.get_mut(group) {
            group.push(index);
        }
    }

    pub(super) fn bytes_per_block(&self) -> Result<u64, LayoutError> {
        let what = "bytes per block of a buffer";
        let runs = self.form.segment_runs(self.num_layers)?;
        runs.into_iter().try_fold(0, |sum, (count, bytes)| add(what, sum, mul(what, count, bytes)?))
    }

    /// Lays the segments back to back.
    pub(super) fn plan(
        &self,
        layers: &[Layer],
        max_blocks: NumBlocks,
    ) -> Result<BufferPlan, LayoutError> {
        let what = "bytes of a buffer";
        let mut segments = Vec::new();
        let mut end = 0;
        for (count, bytes_per_block) in self.form.segment_runs(self.num_layers)? {
            let capacity_bytes = mul(what, bytes_per_block, max_blocks.0)?;
            for _ in 0..count {
                segments.push(SegmentPlan { offset_bytes: end, capacity_bytes, bytes_per_block });
                end = add(what, end, capacity_bytes)?;
            }
        }
        i64::try_from(end).map_err(|_| LayoutError::Overflow { what })?;
        let members = self.members.iter().filter_map(|&index| layers.get(index));
        let layers = members.map(|layer| layer.name.clone()).collect();
        Ok(BufferPlan { layers, segments, capacity_bytes: end })
    }
}
