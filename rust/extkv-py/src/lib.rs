//! The Python module `extkv._extkv`: parse, detach, call the core, wrap. No logic, no arithmetic.

mod device;
mod dlpack;
mod error;
mod kv;
mod memory;
mod protocol;
mod sched;
mod sizing;
mod transport;

use pyo3::prelude::*;

/// Native part of extkv.
#[pymodule]
mod _extkv {
    #[pymodule_export]
    use super::device::{PyDevice, cuda_device_count, host_memory_info, set_host_memory_budget};
    #[pymodule_export]
    use super::kv::{
        PyCachePlan, PyKvSpec, PyLayer, PyLayout, common_block_bytes, dtype_of, hybrid_layers,
    };
    #[pymodule_export]
    use super::memory::{
        PyBuffer, PyPreparedGrowth, grow_together, prepare_together, shrink_together,
    };
    #[pymodule_export]
    use super::protocol::{
        PyEngineCoreOutput, PyEngineCoreOutputs, PyEngineCoreRequest, PySamplingParams,
        encode_output_columns, protocol_decode, protocol_encode, protocol_fields,
        protocol_profile_of_version, protocol_request_type,
    };
    #[pymodule_export]
    use super::sched::{
        PyAcceptanceModel, PyAcceptanceRates, PyDecision, PyOnlineTemperatures, PyPlan,
        PyScheduler, PySpeculationController, PyStepCost, PyStepOutput, PyStepReport,
        PyTemperatureFit, PyTemperatures, PyVerifyPlan, PyVerifyPlanner, check_pairing,
        fit_step_cost, fit_temperatures,
    };
    #[pymodule_export]
    use super::sizing::{
        agree, check_commit, encoder_cache_bytes, estimate, limit_record, replay_record,
        reservation_blocks, size_from_trace,
    };
    #[pymodule_export]
    use super::transport::{PyCall, PyEngineEnd, PyFrontEnd, PyStream};
}
