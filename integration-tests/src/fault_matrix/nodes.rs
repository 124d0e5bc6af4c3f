//! What the nodes of a rig are: the real model on the processors, or a tiny one on the false GPU, which interprets each instruction.
//!
//! All that differs between the two is here: how KV travels, the model, the pools, the lengths of prompts and answers, and how long
//! everybody waits.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use cli::local_cluster::LocalClusterOptions;

use super::cells::{Cell, FaultKind, Victim};
use super::options::executable;
use crate::cluster::options_of;
use crate::false_gpu::{self, FalseGpu, Told};
use crate::token_exact::OUTPUT_TOKENS;
use crate::{MODEL, PROSE};

/// What a command may call them.
const NAMES: [&str; 6] = ["grpc", "shm", "shm-staged", "cuda-ipc", "nccl", "gpu-grpc"];
const ON_GPUS: [&str; 3] = ["cuda-ipc", "nccl", "gpu-grpc"];

/// The tokens of prompts and chunks on the processors by those on the false GPU, so that a prompt has as many chunks on both. The
/// false GPU takes 14 ms of a core for a token of the tiny model (measured: a prompt of 70 tokens in a second), the processors take
/// 2 ms for one of the real model.
const SHORTER: u32 = 4;
/// The time of an answer of the shorter prompts by that on the processors: prompts take twice as long, steps of decode three times,
/// and four interpreters share two cores.
const SLOWER: u32 = 4;
/// 64 blocks of 16 KiB, for two layers of two heads of 64 values in bf16: eight requests of the matrix.
const GPU_POOL: &str = "1MiB";
/// 16 blocks, which two requests need.
const TINY_GPU_POOL: &str = "256KiB";
/// Each byte is a token of the tiny model, and `/tokenize` counts no more than 32,768 (`coordinator/src/api/limits.rs`).
const GPU_PROSE_BYTES: usize = 30_000;

/// How the nodes compute, and how KV travels between them.
#[derive(Clone, Copy, Debug)]
pub struct Nodes {
    /// `grpc` where the link's faults are wanted: shared memory has no link. `shm` is written in place; `shm-staged` goes through a
    /// ring. `cuda-ipc`, `nccl` and `gpu-grpc` are for nodes on GPUs.
    pub transports: &'static str,
    /// What nodes on GPUs need. `None`: the processors compute.
    pub gpu: Option<FalseGpu>,
}

/// Of [`super::options::Timers::Short`].
pub(super) struct ShortTimers {
    pub coordinator: [&'static str; 3],
    pub prefill: &'static str,
    pub decode: &'static str,
}

impl Nodes {
    /// The real model, and a link between the nodes.
    pub const ON_PROCESSORS: Self = Self {
        transports: "grpc",
        gpu: None,
    };

    /// Nodes by the name of their transport. None when there is no such transport.
    pub fn named(name: &str, gpu: FalseGpu) -> Option<Self> {
        let transports = NAMES.into_iter().find(|known| *known == name)?;
        Some(Self {
            transports,
            gpu: ON_GPUS.contains(&transports).then_some(gpu),
        })
    }

    /// The setting of the nodes. A pair of GPUs that cannot go its own way goes by gRPC, as users have it; [`super::rig::Rig::handoffs`]
    /// tells how many did.
    pub(super) fn flag(&self) -> String {
        let names = match self.transports {
            "shm-staged" => "shm",
            "gpu-grpc" => "grpc",
            "cuda-ipc" => "cuda-ipc,grpc",
            "nccl" => "nccl,grpc",
            name => name,
        };
        format!("--transports={names}")
    }

    /// Whether KV passes the link, so that bits of it can be turned there.
    pub fn is_kv_on_link(&self) -> bool {
        ["grpc", "gpu-grpc"].contains(&self.transports)
    }

    /// Whether a cell of the matrix can strike such nodes.
    pub fn has_cell(&self, cell: Cell) -> bool {
        let is_of_bytes = matches!(cell.fault, FaultKind::Flip | FaultKind::Cut);
        match (cell.victim, self.transports) {
            (Victim::Link, "grpc" | "gpu-grpc") => true,
            // NCCL's control stream passes the link, but no KV does.
            (Victim::Link, "nccl") => !is_of_bytes,
            // Between processes of one host there is none.
            (Victim::Link, _) => false,
            _ => true,
        }
    }

    /// A cluster of such nodes. `folder` takes what they need and what their drivers tell.
    pub(super) fn options(&self, topology: &str, folder: &Path) -> Result<LocalClusterOptions> {
        let Some(gpu) = self.gpu else {
            return options_of(executable()?, topology);
        };
        let model = folder.join("tiny.gguf");
        (gpu.write_model)(&model)?;
        let mut options = LocalClusterOptions::new(executable()?, topology.parse()?, model);
        options.settings.served_model_name = vec![MODEL.to_owned()];
        options.settings.devices = vec!["cuda:0".parse()?];
        // The false driver keeps account of each byte: little KV, and small steps.
        options.settings.kv_cache_memory = Some(self.pool().to_owned());
        options.settings.max_num_batched_tokens = Some(self.tokens(128));
        let variables = false_gpu::variables(folder, gpu.kernel_cache.map(Path::new))?;
        options.environment.extend(variables);
        Ok(options)
    }

    /// What was wrong by the account of the drivers, once the processes have ended. Those in `in_order`, numbers by names, ended by
    /// themselves, so each driver has told something.
    pub(super) fn wrong_on_gpus(&self, folder: &Path, in_order: &BTreeMap<String, u32>) -> Result<Vec<String>> {
        if self.gpu.is_none() {
            return Ok(Vec::new());
        }
        let told = Told::read(folder)?;
        let silent = in_order
            .iter()
            .filter(|(_, process)| !told.processes.contains(*process));
        let mut wrong: Vec<String> = silent
            .map(|(name, process)| format!("the driver of {name}, process {process}, told nothing at its end"))
            .collect();
        wrong.extend(told.wrong);
        Ok(wrong)
    }

    /// Small enough that blocks are used again all the time.
    pub(super) fn pool(&self) -> &'static str {
        match self.gpu {
            None => "80MiB",
            Some(_) => GPU_POOL,
        }
    }

    /// Room for two requests at most.
    pub(crate) fn tiny_pool(&self) -> &'static str {
        match self.gpu {
            // 56 blocks of the default model.
            None => "20MiB",
            Some(_) => TINY_GPU_POOL,
        }
    }

    /// What prompts are cut from.
    pub(crate) fn prose(&self) -> &'static str {
        match self.gpu {
            None => PROSE,
            Some(_) => &PROSE[..PROSE.floor_char_boundary(GPU_PROSE_BYTES)],
        }
    }

    /// So many tokens of a prompt or a chunk, as these nodes get them.
    pub(crate) fn tokens(&self, on_processors: u32) -> u32 {
        match self.gpu {
            None => on_processors,
            Some(_) => on_processors / SHORTER,
        }
    }

    /// Lengths of prompts, as these nodes get them.
    pub(crate) fn prompt_tokens(&self, on_processors: Range<usize>) -> Range<usize> {
        match self.gpu {
            None => on_processors,
            Some(_) => on_processors.start / SHORTER as usize..on_processors.end / SHORTER as usize,
        }
    }

    /// Tokens of an answer. On GPUs half of them are still so many that faults find one in its middle.
    pub(crate) fn output_tokens(&self) -> u32 {
        match self.gpu {
            None => OUTPUT_TOKENS,
            Some(_) => OUTPUT_TOKENS / 2,
        }
    }

    /// How long somebody waits for these nodes who would wait so long for nodes on the processors.
    pub fn patience(&self, on_processors: Duration) -> Duration {
        match self.gpu {
            None => on_processors,
            Some(_) => on_processors * SLOWER,
        }
    }

    /// On GPUs [`SLOWER`] times those on the processors. So the deadlines of NCCL (15 s for a communicator, 8 s for an exchange) come
    /// before those of the request that waits for it. The lease stays: a node reports without asking its device.
    pub(super) fn short_timers(&self) -> ShortTimers {
        match self.gpu {
            None => ShortTimers {
                coordinator: [
                    "--lease-ms=2000",
                    "--accept-timeout-ms=6000",
                    "--stream-silence-ms-max=8000",
                ],
                prefill: "--hold-ms-max=4000",
                decode: "--reservation-ms-max=8000",
            },
            Some(_) => ShortTimers {
                coordinator: [
                    "--lease-ms=2000",
                    "--accept-timeout-ms=24000",
                    "--stream-silence-ms-max=32000",
                ],
                prefill: "--hold-ms-max=16000",
                decode: "--reservation-ms-max=32000",
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use service_runtime::failpoints::FaultPoint;

    use super::*;

    const GPU: FalseGpu = FalseGpu {
        write_model: |_| Ok(()),
        kernel_cache: None,
    };

    fn named(name: &str) -> Nodes {
        Nodes::named(name, GPU).expect("a name")
    }

    #[test]
    fn a_name_says_whether_the_nodes_are_on_gpus_and_what_can_strike_them() {
        assert!(Nodes::named("tcp", GPU).is_none());
        let link = |fault| Cell {
            victim: Victim::Link,
            fault,
            point: FaultPoint::Queued,
        };
        let of = |name| {
            let nodes = named(name);
            let strikes = [FaultKind::Reset, FaultKind::Flip].map(|fault| nodes.has_cell(link(fault)));
            (nodes.gpu.is_some(), strikes)
        };
        assert_eq!(of("grpc"), (false, [true, true]));
        assert_eq!(of("shm-staged"), (false, [false, false]));
        assert_eq!(of("cuda-ipc"), (true, [false, false]));
        assert_eq!(of("nccl"), (true, [true, false]));
        assert_eq!(of("gpu-grpc"), (true, [true, true]));
        let kill = Cell {
            victim: Victim::Decode,
            ..link(FaultKind::Kill)
        };
        assert!(named("cuda-ipc").has_cell(kill));
    }

    #[test]
    fn a_prompt_on_a_gpu_has_as_many_chunks() {
        let (real, gpu) = (Nodes::ON_PROCESSORS, named("nccl"));
        let chunks = |nodes: &Nodes| nodes.prompt_tokens(200..420).end as u32 / nodes.tokens(128);
        assert_eq!(chunks(&real), chunks(&gpu));
        assert_eq!(gpu.flag(), "--transports=nccl,grpc");
    }
}
