//! Owns what the handles of the driver stand for, as data without rules: streams, events, memory, modules, captures, graphs.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::Instant;

use ptx_vm::{Kernel, Memory, Module};

use crate::codes::Code;
use crate::order::{Clock, Mark, Point};
use crate::shared_page::SharedPage;
use crate::work::Work;

pub(crate) struct Device {
    /// Kernels of this device see only this memory: there are no peers.
    pub(crate) memory: Memory,
    pub(crate) used_bytes: usize,
    /// How often its primary context is retained.
    pub(crate) retained: u32,
    pub(crate) default_stream: usize,
    /// What ended the context.
    pub(crate) sticky: Option<Code>,
}

/// Work in a stream.
pub(crate) struct Operation {
    pub(crate) mark: Mark,
    pub(crate) after: Vec<Point>,
    pub(crate) work: Work,
}

pub(crate) struct Stream {
    pub(crate) device: usize,
    /// Made without CU_STREAM_NON_BLOCKING: it and the legacy stream wait for each other.
    pub(crate) is_blocking: bool,
    pub(crate) queue: VecDeque<Operation>,
    /// The operation that it was given last.
    pub(crate) last: Mark,
    /// All operations up to this number are over.
    pub(crate) done: u64,
    pub(crate) capture: Option<u64>,
}

impl Stream {
    pub(crate) fn new(slot: usize, device: usize, is_blocking: bool) -> Self {
        let last = Mark {
            point: Point {
                stream: slot,
                number: 0,
            },
            clock: Arc::new(Clock::default()),
        };
        Self {
            device,
            is_blocking,
            queue: VecDeque::new(),
            last,
            done: 0,
            capture: None,
        }
    }
}

/// Words of the page of an event that processes share.
pub(crate) const RECORDED: usize = 0;
pub(crate) const DONE: usize = 1;

#[derive(Clone, Debug)]
pub(crate) enum Recorded {
    Never,
    /// In a stream of this process.
    At {
        mark: Mark,
        ticket: u64,
    },
    /// In a capture, behind these nodes.
    Captured {
        capture: u64,
        tips: Vec<usize>,
    },
}

pub(crate) struct Event {
    pub(crate) device: usize,
    pub(crate) has_timing: bool,
    pub(crate) recorded: Recorded,
    /// When the device came to a record, and its ticket.
    pub(crate) finished: Option<(u64, Instant)>,
    /// Of an event that processes share.
    pub(crate) page: Option<Arc<SharedPage>>,
}

/// Words of the page of memory that was exported.
pub(crate) const FREED: usize = 0;
pub(crate) const IMPORTERS: std::ops::Range<usize> = 1..33;

#[derive(Debug)]
pub(crate) enum Origin {
    /// `cuMemAlloc`. The page is there once it was exported.
    Plain { page: Option<Arc<SharedPage>> },
    /// `cuMemAllocAsync`.
    Ordered,
    /// `cuIpcOpenMemHandle`, so many times. The word of the page has this process's id.
    Imported {
        page: Arc<SharedPage>,
        key: (u32, u64),
        times: u32,
        word: usize,
    },
}

#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) bytes: usize,
    pub(crate) device: usize,
    pub(crate) file: OwnedFd,
    pub(crate) origin: Origin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PinnedBy {
    Allocated,
    Registered,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Pinned {
    pub(crate) bytes: usize,
    pub(crate) by: PinnedBy,
}

/// A source that the host must not change before it knows that the operation is over.
pub(crate) struct Watched {
    pub(crate) point: Point,
    pub(crate) at: u64,
    pub(crate) bytes: usize,
    pub(crate) hash: u64,
}

pub(crate) struct LoadedModule {
    pub(crate) device: usize,
    pub(crate) module: Module,
    /// A name has one handle.
    pub(crate) functions: BTreeMap<String, u64>,
}

pub(crate) struct Function {
    pub(crate) module: u64,
    pub(crate) device: usize,
    pub(crate) kernel: Arc<Kernel>,
    /// What a launch may ask for, set by an attribute.
    pub(crate) dynamic_shared_bytes_max: usize,
}

/// Captured work: the nodes that it follows are before it in the list.
#[derive(Clone)]
pub(crate) struct Node {
    /// Streams of a capture are lanes of the graph; the first one is 0.
    pub(crate) lane: usize,
    pub(crate) after: Vec<usize>,
    pub(crate) work: Work,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CaptureMode {
    Global,
    ThreadLocal,
    Relaxed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CaptureState {
    Active,
    Invalidated,
}

pub(crate) struct Capture {
    pub(crate) device: usize,
    pub(crate) mode: CaptureMode,
    pub(crate) thread: ThreadId,
    pub(crate) state: CaptureState,
    pub(crate) nodes: Vec<Node>,
    /// The streams, the first one first, each with the nodes that its next work follows.
    pub(crate) lanes: Vec<(usize, Vec<usize>)>,
}

/// What a capture made: a graph, and in a form of its own an executable one.
#[derive(Clone)]
pub(crate) struct Graph {
    pub(crate) device: usize,
    pub(crate) nodes: Arc<[Node]>,
    pub(crate) lane_count: usize,
}

pub(crate) struct Executable {
    pub(crate) graph: Graph,
    /// Streams without a handle, for the lanes but the first.
    pub(crate) lanes: Vec<usize>,
    /// A launch waits for the launch before it.
    pub(crate) last: Option<Mark>,
}
