//! Owns the whole state of the driver: one value behind one lock (`driver.rs`). The rules are in the files that implement parts of
//! it: `memory.rs`, `queue.rs`, `execute.rs`, `capture.rs`.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use ptx_vm::{FindingKind, Findings, Memory};

use crate::address_space::AddressSpace;
use crate::codes::{Answer, Code};
use crate::context;
use crate::objects::{
    Allocation, Capture, Device, Event, Executable, Function, Graph, LoadedModule, Pinned, Recorded, Stream, Watched,
};
use crate::order::{Clock, Mark, Point, Random};
use crate::settings::{BadVariable, HostClocks, Settings};

/// Handles of the legacy stream, beside NULL, and of the per-thread one.
const STREAM_LEGACY: u64 = 1;
const STREAM_PER_THREAD: u64 = 2;

pub(crate) struct State {
    pub(crate) settings: Result<Settings, BadVariable>,
    pub(crate) is_initialised: bool,
    pub(crate) devices: Vec<Device>,
    /// By slot. A destroyed stream keeps its slot until its work is done, and for ever after.
    pub(crate) streams: Vec<Stream>,
    pub(crate) stream_handles: BTreeMap<u64, usize>,
    pub(crate) events: HashMap<u64, Event>,
    pub(crate) space: AddressSpace,
    /// By their start.
    pub(crate) allocations: BTreeMap<u64, Allocation>,
    pub(crate) pinned: BTreeMap<u64, Pinned>,
    pub(crate) watched: Vec<Watched>,
    pub(crate) modules: HashMap<u64, LoadedModule>,
    pub(crate) functions: HashMap<u64, Function>,
    pub(crate) captures: BTreeMap<u64, Capture>,
    pub(crate) graphs: HashMap<u64, Graph>,
    pub(crate) executables: HashMap<u64, Executable>,
    pub(crate) findings: Findings,
    pub(crate) faults: Vec<String>,
    /// The operations that used device memory, in the order in which they ran.
    pub(crate) ran: Vec<Point>,
    pub(crate) random: Random,
    pub(crate) calls: BTreeMap<&'static str, u64>,
    /// The call that is under way, and when the last one began.
    pub(crate) call: &'static str,
    pub(crate) called_at: Instant,
    pub(crate) launches: u64,
    pub(crate) thread_instructions: u64,
    host_clocks: HashMap<u64, Clock>,
    /// What all threads knew at a meeting.
    met: Clock,
    next_handle: u64,
}

/// The number of this thread among those that called the driver, from 1.
fn thread_number() -> u64 {
    static THREADS: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static NUMBER: Cell<u64> = const { Cell::new(0) };
    }
    NUMBER.with(|number| {
        if number.get() == 0 {
            number.set(THREADS.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    })
}

impl State {
    pub(crate) fn new(settings: Result<Settings, BadVariable>) -> Self {
        let usable = settings.as_ref().ok();
        let random = Random::new(usable.map_or(0, |settings| settings.seed));
        let mut state = Self {
            is_initialised: false,
            devices: Vec::new(),
            streams: Vec::new(),
            stream_handles: BTreeMap::new(),
            events: HashMap::new(),
            space: AddressSpace::new(),
            allocations: BTreeMap::new(),
            pinned: BTreeMap::new(),
            watched: Vec::new(),
            modules: HashMap::new(),
            functions: HashMap::new(),
            captures: BTreeMap::new(),
            graphs: HashMap::new(),
            executables: HashMap::new(),
            findings: Findings::default(),
            faults: Vec::new(),
            ran: Vec::new(),
            random,
            calls: BTreeMap::new(),
            call: "",
            called_at: Instant::now(),
            launches: 0,
            thread_instructions: 0,
            host_clocks: HashMap::new(),
            met: Clock::default(),
            next_handle: 0x1000,
            settings,
        };
        let count = state.settings.as_ref().map_or(0, |settings| settings.devices);
        for device in 0..count {
            let default_stream = state.new_stream(device, true);
            let memory = Memory::default();
            state.devices.push(Device {
                memory,
                used_bytes: 0,
                retained: 0,
                default_stream,
                sticky: None,
            });
        }
        state
    }

    /// As `new`, but no address and no handle of before is given out again.
    pub(crate) fn renew(&mut self, settings: Result<Settings, BadVariable>) {
        let old: Vec<(u64, usize)> = self
            .allocations
            .iter()
            .map(|(at, memory)| (*at, memory.bytes))
            .collect();
        for (at, bytes) in old {
            self.space.unmap(at, bytes);
        }
        let mut new = State::new(settings);
        std::mem::swap(&mut new.space, &mut self.space);
        new.next_handle = self.next_handle;
        *self = new;
    }

    pub(crate) fn new_handle(&mut self) -> u64 {
        self.next_handle += 16;
        self.next_handle
    }

    /// The slot of a stream without a handle.
    pub(crate) fn new_stream(&mut self, device: usize, is_blocking: bool) -> usize {
        let slot = self.streams.len();
        self.streams.push(Stream::new(slot, device, is_blocking));
        slot
    }

    /// The device whose context is current, if the context exists.
    pub(crate) fn current_device(&self) -> Result<usize, Code> {
        let exists = |device: &usize| self.devices.get(*device).is_some_and(|device| device.retained > 0);
        context::current().filter(exists).ok_or(Code::INVALID_CONTEXT)
    }

    pub(crate) fn stream(&mut self, handle: u64) -> Result<usize, Code> {
        match handle {
            0 | STREAM_LEGACY => Ok(self.devices[self.current_device()?].default_stream),
            STREAM_PER_THREAD => {
                self.misuse("the per-thread default stream is not modelled: make a stream");
                Err(Code::INVALID_HANDLE)
            }
            _ => self.stream_handles.get(&handle).copied().ok_or(Code::INVALID_HANDLE),
        }
    }

    /// Whether there is the file of a setting, by which a test tells its wish.
    pub(crate) fn has_file(&self, of: impl Fn(&Settings) -> Option<&Path>) -> bool {
        let path = self.settings.as_ref().ok().and_then(of);
        path.is_some_and(Path::exists)
    }

    /// An error that the device met while it worked.
    pub(crate) fn device_answer(&self, device: usize) -> Answer {
        self.devices[device].sticky.map_or(Ok(()), Err)
    }

    /// A finding that belongs to the call that is under way.
    pub(crate) fn misuse(&mut self, what: impl Into<String>) {
        self.findings.set_kernel(self.call);
        self.findings.add(FindingKind::HostMisuse, 0, 0, || what.into());
    }

    /// What this thread knows to be over.
    pub(crate) fn host_clock(&mut self) -> &mut Clock {
        let is_separate = self
            .settings
            .as_ref()
            .is_ok_and(|settings| settings.host_clocks == HostClocks::Separate);
        let key = if is_separate { thread_number() } else { 0 };
        if !self.host_clocks.contains_key(&key) {
            let mut all = Clock::default();
            for clock in self.host_clocks.values() {
                all.join(clock);
            }
            self.host_clocks.insert(key, all);
        }
        self.host_clocks.entry(key).or_default()
    }

    /// What another process can have waited for: all that is behind the records of events that processes share. Whoever waits for
    /// another process may have been told any of it, so it counts as known; that may hide a race, and raises no false alarm.
    pub(crate) fn told_to_processes(&self, is_told: impl Fn(&Mark) -> bool) -> Clock {
        let mut told = Clock::default();
        for event in self.events.values().filter(|event| event.page.is_some()) {
            if let Recorded::At { mark, .. } = &event.recorded
                && is_told(mark)
            {
                told.join(&mark.clock);
            }
        }
        told
    }

    /// Tells this thread what the threads that met before it knew, and the later ones what it knows.
    pub(crate) fn meet(&mut self) {
        let mut met = std::mem::take(&mut self.met);
        let mine = self.host_clock();
        met.join(mine);
        mine.join(&met);
        self.met = met;
    }
}
