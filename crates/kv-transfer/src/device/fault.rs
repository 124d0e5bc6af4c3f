//! Why a copy by the node's device was not made.

use std::time::Duration;

use thiserror::Error;

use super::driver::CudaError;
use crate::span::Lent;

/// Why a transport cannot use the node's device. The peer is not to blame.
#[derive(Debug, Error)]
pub enum DeviceFault {
    /// A bug: the engine and the transports were built of two versions of the driver's crate.
    #[error("the engine's device is none that the transports know")]
    NotCuda,
    /// Nothing was launched.
    #[error("the device refused: {0}")]
    Refused(CudaError),
    #[error("the device failed during a copy: {0}; restart the node")]
    Failed(CudaError),
    #[error("a copy has not completed after {} ms: the device does not answer; restart the node", .waited.as_millis())]
    Late { waited: Duration },
    #[error("no pinned buffer came free in {} ms: the device does not answer; restart the node", .waited.as_millis())]
    NoBuffer { waited: Duration },
}

impl DeviceFault {
    /// What became of the bytes that were lent to a copy which ended like this.
    pub(crate) fn lent<T>(copied: &Result<T, Self>) -> Lent {
        match copied {
            Ok(_) | Err(DeviceFault::NotCuda | DeviceFault::Refused(_) | DeviceFault::NoBuffer { .. }) => Lent::Back,
            // A device whose context is lost runs nothing of it any more.
            Err(DeviceFault::Failed(error)) if error.is_sticky() => Lent::Back,
            Err(DeviceFault::Failed(_) | DeviceFault::Late { .. }) => Lent::Kept,
        }
    }
}
