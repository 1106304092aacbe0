//! Messages of the data-parallel coordinator: waves, loads and the notices of front ends.

use super::codec::{
    DecodeError, DecodeProblem, DecodeResult, Part, Reader, Record, Source, Visible, Wire, Writer,
};

/// The whole message that tells an engine or front end that its subscription works. It can come
/// again and is to be skipped.
pub const READY_MARKER: &[u8] = b"READY";
/// The whole message that subscribes to everything a coordinator publishes.
pub const SUBSCRIBE_ALL: &[u8] = &[1];

/// The engine that a wave does not wake, because it woke by itself.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub enum Exclusion {
    /// Nobody is excluded.
    #[default]
    Nobody,
    /// The engine of this index.
    Engine(i64),
    /// A socket identity, as the front end of vLLM 0.32 sends it. The coordinator forwards it
    /// unchanged and no engine takes it for its own.
    Identity(Vec<u8>),
}

impl Wire for Exclusion {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        if reader.take_nil() {
            Ok(Self::Nobody)
        } else if reader.is_int() {
            i64::read(reader).map(Self::Engine)
        } else {
            match reader.bin() {
                Ok(identity) => Ok(Self::Identity(identity.to_vec())),
                Err(error) => match error.problem() {
                    DecodeProblem::WrongType { .. } => {
                        Err(reader.unexpected("an int, bytes or nil"))
                    }
                    _ => Err(error),
                },
            }
        }
    }

    fn write(&self, writer: &mut Writer) {
        match self {
            Self::Nobody => writer.nil(),
            Self::Engine(index) => writer.i64(*index),
            Self::Identity(identity) => writer.bin(identity),
        }
    }
}

wire_array! {
    /// Coordinator to engines, request type 02: run this wave.
    pub struct StartDpWave {
        /// Its number.
        wave: i64 [required];
        /// Who does not need it.
        exclude: Exclusion [required];
    }
}

wire_array! {
    /// How much one engine has to do.
    pub struct EngineLoad {
        /// Requests that wait.
        num_waiting: i64 [required];
        /// Requests that run.
        num_running: i64 [required];
        /// Used part of the KV cache; older coordinators leave it out.
        kv_cache_usage: f64 [or 0.0];
    }
}

wire_array! {
    /// Coordinator to front ends: loads or a change of the wave.
    pub struct CoordinatorNews {
        /// Load by engine index; `None` if only the wave changed.
        loads: Option<Vec<EngineLoad>> [required];
        /// The current wave.
        wave: i64 [required];
        /// Whether the engines run.
        is_running: bool [required];
    }
}

/// Front end to coordinator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CoordinatorCommand {
    /// A request was sent while the engines were paused: `(who got it, wave)`.
    FirstRequest {
        /// The engine that got it.
        exclude: Exclusion,
        /// The wave that the front end knows.
        wave: i64,
    },
    /// The number of engines changes.
    ScaleElasticEp {
        /// Engines from now on.
        num_engines: i64,
    },
}

const SCALE_ELASTIC_EP: &str = "SCALE_ELASTIC_EP";

impl Wire for CoordinatorCommand {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        let mut elements = reader.elements("an array, CoordinatorCommand")?;
        elements.require("command")?;
        let command = if reader.is_str() {
            let name = reader.str().map_err(|error| error.in_field("command"))?;
            if name != SCALE_ELASTIC_EP {
                let unknown = DecodeProblem::unknown_text("coordinator command", name);
                return Err(DecodeError::from(unknown).in_field("command"));
            }
            let num_engines = reader.field(&mut elements, "num_engines", i64::read)?;
            Self::ScaleElasticEp { num_engines }
        } else {
            let exclude = Exclusion::read(reader).map_err(|error| error.in_field("exclude"))?;
            Self::FirstRequest { exclude, wave: reader.field(&mut elements, "wave", i64::read)? }
        };
        reader.skip_extra(&elements)?;
        Ok(command)
    }

    fn write(&self, writer: &mut Writer) {
        writer.array_len(2);
        match self {
            Self::FirstRequest { exclude, wave } => {
                exclude.write(writer);
                writer.i64(*wave);
            }
            Self::ScaleElasticEp { num_engines } => {
                writer.str(SCALE_ELASTIC_EP);
                writer.i64(*num_engines);
            }
        }
    }
}

impl Visible for Exclusion {
    fn part(&self) -> Part<'_> {
        match self {
            Self::Nobody => Part::Nil,
            Self::Engine(index) => index.part(),
            Self::Identity(identity) => Part::Bytes(identity),
        }
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        if source.is_nil() {
            Ok(Self::Nobody)
        } else if source.is_bytes() {
            source.bytes().map(Self::Identity)
        } else if source.is_int() {
            i64::from_source(source).map(Self::Engine)
        } else {
            Err(source.is_not("an int, bytes or None"))
        }
    }
}

impl Record for CoordinatorCommand {
    fn name(&self) -> &'static str {
        match self {
            Self::FirstRequest { .. } => "FirstRequest",
            Self::ScaleElasticEp { .. } => "ScaleElasticEp",
        }
    }

    fn parts(&self) -> Vec<(&'static str, Part<'_>)> {
        match self {
            Self::FirstRequest { exclude, wave } => {
                vec![("exclude", exclude.part()), ("wave", wave.part())]
            }
            Self::ScaleElasticEp { num_engines } => vec![("num_engines", num_engines.part())],
        }
    }
}

impl Visible for CoordinatorCommand {
    fn part(&self) -> Part<'_> {
        Part::Record(self)
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        let number = |value: S, name| i64::from_source(&value).map_err(|e| e.in_field(name));
        if let Some(num_engines) = source.field("num_engines")? {
            return Ok(Self::ScaleElasticEp { num_engines: number(num_engines, "num_engines")? });
        }
        match (source.field("exclude")?, source.field("wave")?) {
            (Some(exclude), Some(wave)) => Ok(Self::FirstRequest {
                exclude: Exclusion::from_source(&exclude).map_err(|e| e.in_field("exclude"))?,
                wave: number(wave, "wave")?,
            }),
            _ => Err(source.is_not("a FirstRequest or a ScaleElasticEp")),
        }
    }
}
