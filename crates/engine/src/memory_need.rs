//! How much memory an engine needs, and how much this machine has. Both are known before anything is loaded.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use model_files::config::ModelConfig;
use thiserror::Error;

use crate::EngineLimits;
use crate::cpu::{ATTENTION_ROWS, LANES, LOGITS_ROWS, PARTITION, PARTS, ProductScratch};

/// What every node's process needs besides its engine: the runtime, connections, and what the allocator keeps.
const PROCESS_BYTES: u64 = 64 << 20;

/// Bytes that an engine needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryNeed {
    pub weights: u64,
    pub kv: u64,
    /// Memory of a step, and of the process.
    pub buffers: u64,
}

impl MemoryNeed {
    /// Both at the same time, with the same weights in memory that they share.
    pub fn beside_with_shared_weights(self, other: Self) -> Self {
        Self {
            weights: self.weights.max(other.weights),
            ..self.beside(other)
        }
    }

    /// Both at the same time.
    pub fn beside(self, other: Self) -> Self {
        Self {
            weights: self.weights.saturating_add(other.weights),
            kv: self.kv.saturating_add(other.kv),
            buffers: self.buffers.saturating_add(other.buffers),
        }
    }

    fn total(self) -> u64 {
        self.weights.saturating_add(self.kv).saturating_add(self.buffers)
    }

    /// # Errors
    /// It needs more than there is.
    pub fn check(self, room: MemoryRoom) -> Result<(), NotEnoughMemory> {
        match self.total() <= room.free {
            true => Ok(()),
            false => Err(NotEnoughMemory { need: self, room }),
        }
    }
}

/// The refusal. It is final unless other processes end: nothing was loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "needs {} for weights, {} for KV and {} for buffers, {} {} free; take a smaller model, lower --kv-cache-memory or --max-num-batched-tokens, or end other programs",
    Bytes(.need.weights), Bytes(.need.kv), Bytes(.need.buffers), .room.of, Bytes(.room.free)
)]
pub struct NotEnoughMemory {
    pub need: MemoryNeed,
    pub room: MemoryRoom,
}

/// Decimal, as the sizes of model files are given.
#[derive(Clone, Copy, Debug)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes >= 100_000_000 => write!(f, "{:.1} GB", bytes as f64 / 1e9),
            bytes => write!(f, "{:.1} MB", bytes as f64 / 1e6),
        }
    }
}

/// Memory of a step: an estimate from above.
pub(crate) fn buffer_bytes(config: &ModelConfig, limits: EngineLimits, threads: usize) -> u64 {
    let widest = config.hidden_size.max(config.ffn_size).max(config.query_size());
    // The residual stream and what is normed before it is added, queries and the result of attention, keys and values, the
    // feed-forward part; and the inputs of a matrix, as f32.
    let pairs = 2 * (config.hidden_size + config.query_size() + config.kv_size());
    let row = pairs + config.ffn_size + widest;
    let rows = limits.max_batch_tokens as usize;
    let logits = LOGITS_ROWS.min(rows).saturating_mul(config.vocab_size);
    let tables = 1 + usize::from(config.window_rope.is_some());
    let rope = config.context_length.saturating_mul(tables * config.rope.dims);
    // For each thread: scores of a tile of attention, two sums of its queries, two unpacked tiles, products of few queries, inputs of a matrix, a row,
    // and pairs of panels.
    let queries = ATTENTION_ROWS * config.head_count / config.kv_head_count.max(1);
    let attention = queries * (PARTITION + 2 * (config.head_dim + 2)) + 64 * config.head_dim + PARTS * LANES;
    let of_threads = threads.saturating_mul(attention + 9 * widest + ProductScratch::MAX_BYTES / size_of::<f32>());
    // Sums of the partitions of two contexts, counted also where threads share none.
    let partitions = 2 * config.context_length.div_ceil(PARTITION);
    let sums = partitions.saturating_mul(config.head_count * (config.head_dim + 2) + config.kv_head_count);
    let numbers = [rows.saturating_mul(row), logits, rope, of_threads, sums];
    let numbers = numbers.into_iter().fold(0, usize::saturating_add) as u64;
    numbers
        .saturating_mul(size_of::<f32>() as u64)
        .saturating_add(PROCESS_BYTES)
}

/// The memory that this process may still take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRoom {
    pub free: u64,
    pub of: RoomOf,
}

/// What limits the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoomOf {
    Machine,
    /// A control group, as of a container or a systemd unit.
    Group,
}

impl fmt::Display for RoomOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Machine => "this machine has",
            Self::Group => "this process's control group has",
        })
    }
}

impl MemoryRoom {
    /// `None` where the system does not say it.
    pub fn of_this_process() -> Option<Self> {
        Self::under(Path::new("/"))
    }

    /// The same in a file system that begins at `root`.
    fn under(root: &Path) -> Option<Self> {
        let meminfo = fs::read_to_string(root.join("proc/meminfo")).ok()?;
        let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        let machine = Self {
            free: kib.saturating_mul(1024),
            of: RoomOf::Machine,
        };
        let group = groups(root).into_iter().filter_map(|group| group.free()).min();
        let group = group.map(|free| Self {
            free,
            of: RoomOf::Group,
        });
        Some(group.filter(|group| group.free < machine.free).unwrap_or(machine))
    }
}

/// A folder of a control group, and the names of its files.
struct Group {
    folder: PathBuf,
    limit: &'static str,
    used: &'static str,
    /// The key in `memory.stat` of pages of files that nobody has used for a while. The kernel drops them when memory is wanted.
    idle_files: &'static str,
}

impl Group {
    /// `None` without a limit.
    fn free(&self) -> Option<u64> {
        let text = |name: &str| fs::read_to_string(self.folder.join(name)).ok();
        let number = |name: &str| text(name)?.trim().parse::<u64>().ok();
        // Version 2 writes `max`. Version 1 writes a number that no machine has.
        let limit = number(self.limit)?;
        let used = number(self.used)?;
        let stat = text("memory.stat").unwrap_or_default();
        let idle = stat
            .lines()
            .find_map(|line| line.strip_prefix(self.idle_files)?.trim().parse().ok());
        Some(limit.saturating_sub(used.saturating_sub(idle.unwrap_or(0))))
    }
}

/// The control groups whose limits count for this process: its own and those above it.
fn groups(root: &Path) -> Vec<Group> {
    let own = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut all = Vec::new();
    for line in own.lines() {
        // Number, controllers, path. Version 2 has the number 0 and no controllers.
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let is_memory = controllers.split(',').any(|name| name == "memory");
        if !controllers.is_empty() && !is_memory {
            continue;
        }
        let mounted = match is_memory {
            true => root.join("sys/fs/cgroup/memory"),
            false => root.join("sys/fs/cgroup"),
        };
        // The group of a container is the mounted one, whatever its path outside.
        let relative = Path::new(path.trim_start_matches('/'));
        for folder in relative.ancestors().map(|path| mounted.join(path)) {
            all.push(match is_memory {
                true => Group {
                    folder,
                    limit: "memory.limit_in_bytes",
                    used: "memory.usage_in_bytes",
                    idle_files: "total_inactive_file ",
                },
                false => Group {
                    folder,
                    limit: "memory.max",
                    used: "memory.current",
                    idle_files: "inactive_file ",
                },
            });
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn need(weights: u64, kv: u64) -> MemoryNeed {
        MemoryNeed {
            weights,
            kv,
            buffers: 1,
        }
    }

    #[test]
    fn the_refusal_has_the_figures() {
        let room = MemoryRoom {
            free: 3_900_000_000,
            of: RoomOf::Machine,
        };
        let refused = need(5_100_000_000, 2_000_000_000).check(room).unwrap_err().to_string();
        for part in ["5.1 GB for weights", "2.0 GB for KV", "this machine has 3.9 GB free"] {
            assert!(refused.contains(part), "{part} in {refused}");
        }
        assert!(
            need(1_900_000_000, 1_999_999_999).check(room).is_ok(),
            "it fits to the byte"
        );
        assert!(need(1_900_000_000, 2_000_000_000).check(room).is_err());
        assert!(need(u64::MAX, u64::MAX).check(room).is_err());
    }

    #[test]
    fn processes_that_share_their_weights_need_them_once() {
        let shared = need(5, 2).beside_with_shared_weights(need(5, 3));
        assert_eq!((shared.weights, shared.kv, shared.buffers), (5, 5, 2));
        let private = need(5, 2).beside(need(5, 3));
        assert_eq!((private.weights, private.kv, private.buffers), (10, 5, 2));
    }

    /// A file system with these files, and what its memory is.
    fn room_with(files: &[(&str, &str)]) -> Option<MemoryRoom> {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        MemoryRoom::under(root.path())
    }

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable:    4194304 kB\n");

    #[test]
    fn a_machine_without_limits_has_what_it_says() {
        let room = room_with(&[MEMINFO, ("proc/self/cgroup", "0::/a/b\n")]).unwrap();
        assert_eq!((room.free, room.of), (4 * GIB, RoomOf::Machine));
        let unlimited = room_with(&[
            MEMINFO,
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "max\n"),
            ("sys/fs/cgroup/memory.current", "5\n"),
        ]);
        assert_eq!(unlimited, Some(room));
        assert_eq!(room_with(&[]), None);
        assert_eq!(room_with(&[("proc/meminfo", "MemAvailable: much\n")]), None);
    }

    #[test]
    fn the_strictest_control_group_counts_without_its_idle_files() {
        let room = room_with(&[
            MEMINFO,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/memory.current", "1\n"),
            ("sys/fs/cgroup/a/memory.max", "2147483648\n"),
            ("sys/fs/cgroup/a/memory.current", "1610612736\n"),
            (
                "sys/fs/cgroup/a/memory.stat",
                "anon 5\ninactive_file 536870912\nactive_file 7\n",
            ),
        ]);
        let room = room.unwrap();
        assert_eq!((room.free, room.of), (GIB, RoomOf::Group));
    }

    #[test]
    fn version_1_of_control_groups_counts_too_also_inside_a_container() {
        let files = [
            MEMINFO,
            ("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "2000000000\n"),
        ];
        let room = room_with(&files).unwrap();
        assert_eq!((room.free, room.of), (0, RoomOf::Group), "used beyond the limit");
        let mut unlimited = files;
        unlimited[2].1 = "9223372036854771712\n";
        assert_eq!(room_with(&unlimited).unwrap().of, RoomOf::Machine);
    }
}
