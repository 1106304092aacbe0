//! What a front end knows of its engines: who came, who is ready, who is dead. Pure state.

use std::sync::Arc;

use crate::protocol::{EngineCoreReadyResponse, HandshakeMessage, Profile};

use super::balance::EngineLoadEstimate;
use super::zmtp::Frames;

/// One engine.
#[derive(Debug, Clone, Default)]
pub(super) struct Engine {
    has_greeted: bool,
    has_confirmed: bool,
    is_registered: bool,
    /// None for an engine that registered without saying anything, as old ones do.
    pub(super) response: Option<Arc<EngineCoreReadyResponse>>,
    /// The same as it came.
    pub(super) response_frames: Frames,
    pub(super) profile: Profile,
    pub(super) death: Option<String>,
    pub(super) load: EngineLoadEstimate,
    /// Requests that it may still work on for nobody.
    pub(super) orphans: Vec<String>,
}

/// How far an engine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineStatus {
    /// It has not come yet.
    Awaited,
    /// It was sent its addresses and is starting.
    Starting,
    /// It takes requests.
    Ready,
    /// It is gone.
    Dead,
}

/// All engines by index.
#[derive(Debug)]
pub(super) struct Registry {
    pub(super) engines: Vec<Engine>,
    expects_local: Option<bool>,
    default_profile: Profile,
}

impl Registry {
    pub(super) fn new(
        num_engines: u16,
        expects_local: Option<bool>,
        default_profile: Profile,
    ) -> Self {
        let fresh = Engine { profile: default_profile, ..Engine::default() };
        Self { engines: vec![fresh; usize::from(num_engines)], expects_local, default_profile }
    }

    /// The index behind an identity.
    pub(super) fn index_of(&self, identity: &[u8]) -> Result<usize, String> {
        let index = <[u8; 2]>::try_from(identity).map(u16::from_le_bytes).map(usize::from);
        match index {
            Ok(index) if index < self.engines.len() => Ok(index),
            _ => Err(format!(
                "identity {identity:02x?} is no engine; known are the indices 0 to {} as 2 bytes",
                self.engines.len().saturating_sub(1)
            )),
        }
    }

    pub(super) fn status(&self, index: usize) -> EngineStatus {
        let engine = &self.engines[index];
        match engine {
            Engine { death: Some(_), .. } => EngineStatus::Dead,
            Engine { is_registered: true, .. } => EngineStatus::Ready,
            Engine { has_greeted: true, .. } => EngineStatus::Starting,
            _ => EngineStatus::Awaited,
        }
    }

    /// HELLO: whether INIT is to be sent. A second HELLO of a starting engine gets INIT again, one
    /// of a dead engine starts it anew, one of a ready engine is refused.
    pub(super) fn greet(&mut self, index: usize, hello: &HandshakeMessage) -> Result<(), String> {
        if let Some(expected) = self.expects_local
            && expected != hello.local
        {
            return Err(format!(
                "engine {index} says local={}, expected local={expected}",
                hello.local
            ));
        }
        match self.status(index) {
            EngineStatus::Ready => {
                return Err(format!("HELLO of engine {index}, which is ready already"));
            }
            EngineStatus::Dead => {
                let profile = self.default_profile;
                self.engines[index] = Engine { profile, ..Engine::default() };
            }
            EngineStatus::Awaited | EngineStatus::Starting => {}
        }
        self.engines[index].has_greeted = true;
        Ok(())
    }

    /// READY on the handshake socket. It may come before or after the ready response.
    pub(super) fn confirm(&mut self, index: usize) -> Result<(), String> {
        let engine = &mut self.engines[index];
        if !engine.has_greeted {
            return Err(format!("READY of engine {index} before its HELLO"));
        }
        if engine.has_confirmed {
            return Err(format!("a second READY of engine {index}"));
        }
        engine.has_confirmed = true;
        Ok(())
    }

    /// The ready response, or an empty registration.
    pub(super) fn register(
        &mut self,
        index: usize,
        response: Option<EngineCoreReadyResponse>,
        frames: Frames,
    ) -> Result<(), String> {
        let version = response.as_ref().and_then(|response| response.vllm_version.as_deref());
        let profile = version
            .map(Profile::of_vllm_version)
            .transpose()
            .map_err(|error| format!("engine {index}: {error}"))?
            .unwrap_or(self.default_profile);
        let engine = &mut self.engines[index];
        if engine.is_registered && engine.death.is_none() {
            return Err(format!("a second ready response of engine {index}"));
        }
        engine.is_registered = true;
        engine.death = None;
        engine.profile = profile;
        engine.response = response.map(Arc::new);
        engine.response_frames = frames;
        engine.load = EngineLoadEstimate::default();
        Ok(())
    }

    /// An engine's connection is there again without a new start: it was only interrupted.
    pub(super) fn revive(&mut self, index: usize) -> bool {
        let engine = &mut self.engines[index];
        let is_back = engine.is_registered && engine.death.is_some();
        if is_back {
            engine.death = None;
            engine.load = EngineLoadEstimate::default();
        }
        is_back
    }

    /// Marks an engine as gone; returns whether that is news.
    pub(super) fn bury(&mut self, index: usize, reason: &str) -> bool {
        let engine = &mut self.engines[index];
        if engine.death.is_some() || !engine.has_greeted && !engine.is_registered {
            return false;
        }
        engine.death = Some(reason.to_owned());
        true
    }

    /// Loads of the engines that take requests.
    pub(super) fn loads(&self) -> Vec<Option<EngineLoadEstimate>> {
        (0..self.engines.len())
            .map(|index| {
                (self.status(index) == EngineStatus::Ready).then(|| self.engines[index].load)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::HandshakeStatus;

    fn hello(local: bool) -> HandshakeMessage {
        let status = HandshakeStatus::Hello;
        HandshakeMessage { status, local, headless: !local, parallel_config_hash: None }
    }

    fn registry() -> Registry {
        Registry::new(2, None, Profile::V0_32)
    }

    #[test]
    fn an_engine_is_ready_with_its_response_whether_ready_comes_before_or_after() {
        for is_ready_first in [false, true] {
            let mut registry = registry();
            assert_eq!(registry.status(1), EngineStatus::Awaited);
            registry.greet(1, &hello(false)).unwrap();
            assert_eq!(registry.status(1), EngineStatus::Starting);
            if is_ready_first {
                registry.confirm(1).unwrap();
                assert_eq!(registry.status(1), EngineStatus::Starting);
            }
            registry.register(1, None, Vec::new()).unwrap();
            assert_eq!(registry.status(1), EngineStatus::Ready);
            if !is_ready_first {
                registry.confirm(1).unwrap();
            }
            assert_eq!(registry.status(0), EngineStatus::Awaited);
        }
    }

    #[test]
    fn a_second_hello_is_answered_while_starting_and_refused_when_ready() {
        let mut registry = registry();
        registry.greet(0, &hello(false)).unwrap();
        registry.greet(0, &hello(false)).unwrap();
        registry.register(0, None, Vec::new()).unwrap();
        assert!(registry.greet(0, &hello(false)).unwrap_err().contains("ready already"));
        assert_eq!(registry.status(0), EngineStatus::Ready);
    }

    #[test]
    fn a_dead_engine_may_start_anew() {
        let mut registry = registry();
        registry.greet(0, &hello(false)).unwrap();
        registry.register(0, None, Vec::new()).unwrap();
        assert!(registry.bury(0, "killed"));
        assert!(!registry.bury(0, "again"));
        registry.greet(0, &hello(false)).unwrap();
        assert_eq!(registry.status(0), EngineStatus::Starting);
        registry.confirm(0).unwrap();
        registry.register(0, None, Vec::new()).unwrap();
        assert_eq!(registry.status(0), EngineStatus::Ready);
    }

    #[test]
    fn an_interrupted_engine_comes_back_without_hello() {
        let mut registry = registry();
        assert!(!registry.revive(0));
        registry.greet(0, &hello(false)).unwrap();
        registry.register(0, None, Vec::new()).unwrap();
        assert!(!registry.revive(0));
        registry.bury(0, "interrupted");
        assert!(registry.revive(0));
        assert_eq!(registry.status(0), EngineStatus::Ready);
    }

    #[test]
    fn messages_out_of_order_are_refused() {
        let mut registry = registry();
        assert!(registry.confirm(0).unwrap_err().contains("before its HELLO"));
        registry.greet(0, &hello(false)).unwrap();
        registry.confirm(0).unwrap();
        assert!(registry.confirm(0).unwrap_err().contains("second READY"));
        registry.register(0, None, Vec::new()).unwrap();
        assert!(
            registry.register(0, None, Vec::new()).unwrap_err().contains("second ready response")
        );
        assert!(!registry.bury(1, "never came"));
    }

    #[test]
    fn identities_are_two_bytes_little_endian() {
        let registry = registry();
        assert_eq!(registry.index_of(&[1, 0]), Ok(1));
        for identity in [&[2, 0][..], &[0, 1], &[0], &[0, 0, 0], &[]] {
            assert!(registry.index_of(identity).unwrap_err().contains("is no engine"));
        }
    }

    #[test]
    fn local_must_be_as_expected() {
        let mut registry = Registry::new(1, Some(true), Profile::V0_32);
        assert!(registry.greet(0, &hello(false)).unwrap_err().contains("expected local=true"));
        registry.greet(0, &hello(true)).unwrap();
    }
}
