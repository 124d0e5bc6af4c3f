//! Cores, memory, shared memory and open files of this machine.

use engine::MemoryRoom;
use rustix::process::{Resource, getrlimit};

use super::finding::{Finding, Group};
use crate::observe::format::bytes;

/// A coordinator takes 4,096 connections unless it is told otherwise (`connections_max`), each with a descriptor.
const OPEN_FILES_WANTED: u64 = 4096;
/// The weights of the smallest model, KV and buffers of one prefill and one decode node.
const MEMORY_WANTED_BYTES: u64 = 2 << 30;
const SHARED_MEMORY: &str = "/dev/shm";

pub(super) fn look() -> Vec<Finding> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    vec![
        of_cores(cores),
        of_memory(MemoryRoom::of_this_process()),
        of_shared_memory(SHARED_MEMORY),
        of_open_files(getrlimit(Resource::Nofile).current),
    ]
}

fn of_cores(cores: usize) -> Finding {
    match cores {
        0 | 1 => Group::Machine.warn(
            "cores",
            "1 core",
            "expect streams to stall while a prompt is computed: prefill and decode share the core",
        ),
        _ => Group::Machine.ok("cores", format!("{cores} cores")),
    }
}

fn of_memory(room: Option<MemoryRoom>) -> Finding {
    let Some(room) = room else {
        return Group::Machine.warn(
            "memory",
            "the system does not say how much is free",
            "compare `baton model inspect MODEL` with the machine yourself",
        );
    };
    let seen = format!("{} {} free", room.of, bytes(room.free));
    match room.free >= MEMORY_WANTED_BYTES {
        true => Group::Machine.ok("memory", seen),
        false => Group::Machine.warn(
            "memory",
            seen,
            "end other programs, or lower --kv-cache-memory of `baton up`, which is 512MiB for each node",
        ),
    }
}

/// KV and weights are in memory files without a name, which need no room there. NVIDIA's NCCL has its buffers there.
fn of_shared_memory(path: &str) -> Finding {
    match rustix::fs::statvfs(path) {
        Ok(facts) => {
            let of_blocks = |blocks: u64| bytes(blocks.saturating_mul(facts.f_frsize));
            let (free, size) = (of_blocks(facts.f_bavail), of_blocks(facts.f_blocks));
            let seen = format!("{free} of {size} free; only --transports nccl needs room there");
            Group::Machine.ok(SHARED_MEMORY, seen)
        }
        Err(error) => Group::Machine.warn(
            SHARED_MEMORY,
            format!("{path} cannot be read: {error}"),
            "mount a tmpfs there if GPUs are to use --transports nccl; nothing else needs it",
        ),
    }
}

/// `None`: there is no limit.
fn of_open_files(limit: Option<u64>) -> Finding {
    match limit {
        Some(limit) if limit < OPEN_FILES_WANTED => Group::Machine.warn(
            "open files",
            format!("{limit} for each process"),
            format!("ulimit -n {OPEN_FILES_WANTED}, or LimitNOFILE= of a unit, before many clients connect at once"),
        ),
        Some(limit) => Group::Machine.ok("open files", format!("{limit} for each process")),
        None => Group::Machine.ok("open files", "without a limit"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::*;

    #[test]
    fn a_small_machine_is_warned_of_and_never_a_failure() {
        assert_eq!(of_cores(1).verdict, Verdict::Warn);
        assert_eq!(of_cores(2).verdict, Verdict::Ok);
        assert_eq!(of_open_files(Some(1024)).verdict, Verdict::Warn);
        assert_eq!(of_open_files(Some(4096)).verdict, Verdict::Ok);
        assert_eq!(of_memory(None).verdict, Verdict::Warn);
        assert_eq!(of_shared_memory("/no/such/folder").verdict, Verdict::Warn);
        assert!(look().iter().all(|finding| finding.verdict != Verdict::Fail));
    }
}
