//! The handoff between two processes of this host, by CUDA IPC and by NCCL: every byte is checked, and one of the two is killed
//! in the middle. Not run on hardware.

mod here;
mod ipc;
mod lane;
mod nccl;
mod peer;
mod rank;

use std::process::Command;
use std::time::Duration;

use cuda::loader::LibraryDecision;

use super::Gpu;
use super::part::{Part, run_apart};
use super::step::{Row, StepReport};

pub(super) use self::ipc::{open_here, own_here};
pub(super) use self::nccl::{first_here, second_here};

/// Both take seconds. Each wait inside has a shorter limit, so that what hangs is named.
const IPC_LIMIT: Duration = Duration::from_secs(120);
const NCCL_LIMIT: Duration = Duration::from_secs(300);
/// NCCL's own variables (NCCL documentation, environment variables).
const INTERFACE: &str = "NCCL_SOCKET_IFNAME";
const HOST: &str = "NCCL_HOSTID";
const NETWORK: &str = "NCCL_NET";

/// By CUDA IPC, and by NCCL if it was found.
pub(super) fn check(gpu: &Gpu, library: &LibraryDecision) -> [StepReport; 2] {
    let ipc = run_apart(Part::Ipc.command(gpu.ordinal), IPC_LIMIT).step(Row::CudaIpc);
    let nccl = match library {
        LibraryDecision::Ready { .. } => run_apart(first_rank(gpu), NCCL_LIMIT).step(Row::Nccl),
        LibraryDecision::NotFound => StepReport::not_run(
            Row::Nccl,
            "NCCL not found (pip install nvidia-nccl-cu13; nvidia-nccl-cu12 for a driver below release 580)",
        ),
        other => StepReport::not_run(Row::Nccl, format!("NCCL is {other}")),
    };
    [ipc, nccl]
}

/// The next GPU has the second rank. Where there is none, both ranks have one GPU.
fn first_rank(gpu: &Gpu) -> anyhow::Result<Command> {
    let next = gpu.ordinal + 1;
    let ordinals = match next < gpu.visible {
        true => (gpu.ordinal, next),
        false => (gpu.ordinal, gpu.ordinal),
    };
    let mut command = Part::Nccl.command(ordinals.0)?;
    command.arg(format!("--peer-device={}", ordinals.1));
    add_variables(&mut command, 0, ordinals);
    Ok(command)
}

/// What a rank's process needs to know. Both are on this host, so NCCL's listener is nobody else's business, and no address of the
/// machine comes into the report. NCCL refuses two ranks on one GPU of one host, and takes the host's name from a variable. Between
/// two such hosts it would use an adapter for InfiniBand, which is not what is checked.
fn add_variables(command: &mut Command, rank: u32, ordinals: (u32, u32)) {
    command.env(INTERFACE, "=lo");
    if ordinals.0 == ordinals.1 {
        command.env(HOST, format!("baton-doctor-{rank}"));
        command.env(NETWORK, "Socket");
    }
}
