//! What the detectors found: one entry for each pair of lines, with a count. It never decides what is a finding.

use std::collections::BTreeMap;
use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FindingKind {
    /// Two threads of a block use shared memory with no barrier between, and one of them writes.
    RaceShared,
    /// The same in global memory, or between two blocks of a launch.
    RaceGlobal,
    /// Two operations use the same bytes, one of them writes, and nothing orders the operations.
    RaceBetweenStreams,
    /// Two blocks of a launch change the same value atomically, so the order of sums is not fixed.
    AtomicBetweenBlocks,
    UninitialisedShared,
    UninitialisedGlobal,
    UninitialisedLocal,
    /// A read of the target of a `cp.async` that its thread has not waited for.
    ReadBeforeAsyncWait,
    /// A thread ended with a `cp.async` that it has not waited for.
    AsyncCopyNotAwaited,
    /// Found by the false driver: pinned memory changed while a copy from it was under way.
    PinnedSourceChanged,
    /// Found by the false driver.
    HostMisuse,
    /// Found by the false driver.
    BadModule,
}

impl FindingKind {
    pub fn name(self) -> &'static str {
        match self {
            FindingKind::RaceShared => "race in shared memory",
            FindingKind::RaceGlobal => "race in global memory",
            FindingKind::RaceBetweenStreams => "race between streams",
            FindingKind::AtomicBetweenBlocks => "atomic between blocks",
            FindingKind::UninitialisedShared => "uninitialised shared memory",
            FindingKind::UninitialisedGlobal => "uninitialised global memory",
            FindingKind::UninitialisedLocal => "uninitialised local memory",
            FindingKind::ReadBeforeAsyncWait => "read before cp.async.wait",
            FindingKind::AsyncCopyNotAwaited => "cp.async not waited for",
            FindingKind::PinnedSourceChanged => "pinned source changed",
            FindingKind::HostMisuse => "misuse by the host",
            FindingKind::BadModule => "bad module",
        }
    }
}

impl fmt::Display for FindingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub kind: FindingKind,
    pub kernel: String,
    /// Of the CUDA source by `.loc`; of the PTX where it has no `.loc`. 0: not a line of a kernel (a copy, a fill).
    pub line: u32,
    /// The other side of a race, which may be in another kernel.
    pub other_line: u32,
    /// How often it happened.
    pub count: u64,
    /// The first time, in words.
    pub first: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kind,
            kernel,
            line,
            other_line,
            count,
            first,
        } = self;
        write!(
            f,
            "{kind} in {kernel}, line {line}, other line {other_line}, {count} times, first: {first}"
        )
    }
}

/// Findings that differ in no field of the key are counted together. The number is the kernel's, by first use.
type Key = (usize, FindingKind, u32, u32);

#[derive(Clone, Debug, Default)]
pub struct Findings {
    kernels: Vec<String>,
    kernel: usize,
    found: BTreeMap<Key, Finding>,
}

impl Findings {
    /// Names the kernel, or the call of the host, that later findings belong to.
    pub fn set_kernel(&mut self, name: &str) {
        let known = self.kernels.iter().position(|kernel| kernel == name);
        self.kernel = known.unwrap_or_else(|| {
            self.kernels.push(name.to_owned());
            self.kernels.len() - 1
        });
    }

    pub fn add(&mut self, kind: FindingKind, line: u32, other_line: u32, first: impl FnOnce() -> String) {
        let kernel = self.kernels.get(self.kernel);
        let new = || Finding {
            kind,
            kernel: kernel.cloned().unwrap_or_default(),
            line,
            other_line,
            count: 0,
            first: first(),
        };
        let key = (self.kernel, kind, line, other_line);
        self.found.entry(key).or_insert_with(new).count += 1;
    }

    /// By kernel in the order of first use, then by kind and lines.
    pub fn list(&self) -> Vec<&Finding> {
        self.found.values().collect()
    }

    pub fn is_empty(&self) -> bool {
        self.found.is_empty()
    }
}
