//! Live requests behind small indices, so that a step needs no look-up by id.
//!
//! An index is reused after its request is removed; whoever keeps one across calls compares the
//! request's id.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::ids::RequestId;
use crate::request::Request;

/// Place of a live request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RequestIndex(usize);

/// All live requests.
#[derive(Debug, Default)]
pub(crate) struct RequestTable {
    entries: Vec<Option<Request>>,
    vacant: Vec<RequestIndex>,
    by_id: BTreeMap<RequestId, RequestIndex>,
}

impl RequestTable {
    pub(crate) fn insert(&mut self, request: Request) -> RequestIndex {
        let index = self.vacant.pop().unwrap_or(RequestIndex(self.entries.len()));
        if index.0 == self.entries.len() {
            self.entries.push(None);
        }
        self.by_id.insert(request.id(), index);
        self.entries[index.0] = Some(request);
        index
    }

    pub(crate) fn remove(&mut self, index: RequestIndex) -> Result<Request> {
        let removed = self.entries.get_mut(index.0).and_then(Option::take);
        let request = removed.ok_or_else(|| missing(index))?;
        self.by_id.remove(&request.id());
        self.vacant.push(index);
        Ok(request)
    }

    pub(crate) fn find(&self, request_id: RequestId) -> Option<RequestIndex> {
        self.by_id.get(&request_id).copied()
    }

    pub(crate) fn get(&self, index: RequestIndex) -> Result<&Request> {
        self.entries.get(index.0).and_then(Option::as_ref).ok_or_else(|| missing(index))
    }

    pub(crate) fn get_mut(&mut self, index: RequestIndex) -> Result<&mut Request> {
        self.entries.get_mut(index.0).and_then(Option::as_mut).ok_or_else(|| missing(index))
    }

    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Live requests in the order of their ids.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (RequestIndex, &Request)> {
        self.by_id.values().filter_map(|&index| self.get(index).ok().map(|found| (index, found)))
    }
}

fn missing(index: RequestIndex) -> Error {
    Error::Corrupt { rule: "a queued request is live", subject: index.0 as u64 }
}
