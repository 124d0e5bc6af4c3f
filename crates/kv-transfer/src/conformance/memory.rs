//! The memory of the conformance suite's KV: plain memory, or a double of an accelerator's memory. The double behaves as a
//! sink and a source in device memory will: no byte of it has an address here, copies run one after the other on a stream
//! of their own, and a call that asked for a copy returns long before the copy is made.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use serving_core::ids::BlockId;

use super::false_cuda::CudaBlocks;
use super::{BLOCK_BYTES, LAYER_BYTES, LAYERS};
use crate::span::{self, DeviceSpan, Span, SpanMemory, SpanMut};
use crate::transport::{KvSource, SourceError};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    Host,
    /// The double of this file.
    Device,
    /// The device of the false CUDA driver.
    Cuda,
}

/// Work of a device's stream.
type Job = Box<dyn FnOnce() + Send>;

/// Runs in order, each piece a while after it was asked for. Ends with its last handle.
#[derive(Clone, Debug)]
struct Stream(mpsc::SyncSender<Job>);

/// As long as a copy of a block over PCIe with its launch. It is long enough to show a caller that does not wait.
const COPY_TAKES: Duration = Duration::from_micros(100);

/// More than any test has under way. A real stream makes its caller wait, which a sink must never do.
const LAUNCHED_MAX: usize = 1 << 16;

impl Stream {
    fn new() -> Self {
        let (jobs, queue) = mpsc::sync_channel::<Job>(LAUNCHED_MAX);
        std::thread::spawn(move || {
            for job in queue {
                std::thread::park_timeout(COPY_TAKES);
                job();
            }
        });
        Self(jobs)
    }
    fn launch(&self, job: impl FnOnce() + Send + 'static) {
        self.0.try_send(Box::new(job)).expect("room on the stream");
    }
}

/// A receiver's blocks: in plain memory, or on a device behind its stream.
#[derive(Debug)]
pub(super) struct Blocks {
    bytes: Arc<Mutex<BTreeMap<BlockId, Vec<u8>>>>,
    stream: Option<Stream>,
    /// Then `bytes` stays empty.
    cuda: Option<CudaBlocks>,
}

impl Blocks {
    pub fn of(kind: MemoryKind) -> Self {
        Self {
            bytes: Arc::default(),
            stream: (kind == MemoryKind::Device).then(Stream::new),
            cuda: (kind == MemoryKind::Cuda).then(CudaBlocks::new),
        }
    }
    pub fn cuda(&self) -> Option<&CudaBlocks> {
        self.cuda.as_ref()
    }
    /// Never waits. `data` may be gone after it has returned.
    pub fn write(&self, block: BlockId, start: usize, data: Span<'_>) {
        if let Some(cuda) = &self.cuda {
            return cuda.write(block, start, data);
        }
        // For a device, the copy that a pinned buffer would take.
        let data = match data {
            Span::Host(data) => Ok(data.to_vec()),
            Span::Device(span) => Err(span),
        };
        let blocks = self.bytes.clone();
        self.after_writes(move || {
            let data = data.unwrap_or_else(|span| {
                span.ready.wait();
                staged(&span).lock().unwrap()[..span.bytes].to_vec()
            });
            let mut blocks = blocks.lock().unwrap();
            let bytes = blocks.entry(block).or_insert_with(|| vec![0; BLOCK_BYTES]);
            bytes[start..start + data.len()].copy_from_slice(&data);
        });
    }
    /// Calls back when all that was written before is in its place.
    pub fn after_writes(&self, then: impl FnOnce() + Send + 'static) {
        match (&self.stream, &self.cuda) {
            (Some(stream), _) => stream.launch(then),
            (None, Some(cuda)) => cuda.after_writes(then),
            (None, None) => then(),
        }
    }
    /// The bytes that a reader would find now. `None` when nothing was written there.
    pub fn get(&self, block: BlockId) -> Option<Vec<u8>> {
        match &self.cuda {
            Some(cuda) => cuda.get(block),
            None => self.bytes.lock().unwrap().get(&block).cloned(),
        }
    }
    pub fn count(&self) -> usize {
        match &self.cuda {
            Some(cuda) => cuda.count(),
            None => self.bytes.lock().unwrap().len(),
        }
    }
}

/// Memory of the double that is no block: where a link keeps a frame.
#[derive(Debug)]
struct Staged(Mutex<Vec<u8>>);

impl SpanMemory for Staged {
    fn checksum(&self, bytes: usize) -> u64 {
        span::checksum(&self.0.lock().unwrap()[..bytes])
    }
}

/// What no other code than the double's can see.
fn staged(span: &DeviceSpan) -> &Mutex<Vec<u8>> {
    let memory: &dyn Any = &*span.memory;
    &memory.downcast_ref::<Staged>().expect("memory of this double").0
}

/// The sender's memory: block b, layer l is filled with a pattern of both.
#[derive(Debug)]
pub(crate) struct Pattern;

/// It repeats after 256 bytes. One byte at a time, a pool of blocks would take a second in a test program, which is not optimised.
fn pattern(block: BlockId, layer: u32) -> Vec<u8> {
    const PERIOD: usize = 256;
    let start = block.0.wrapping_mul(31).wrapping_add(layer * 7);
    let once: Vec<u8> = (0..PERIOD).map(|i| (start as usize + i * 13) as u8).collect();
    once.repeat(LAYER_BYTES / PERIOD)
}

pub(crate) fn whole(block: BlockId) -> Vec<u8> {
    let layers: Vec<Vec<u8>> = (0..LAYERS).map(|layer| pattern(block, layer)).collect();
    layers.concat()
}

impl KvSource for Pattern {
    fn layer_count(&self) -> u32 {
        LAYERS
    }
    fn layer_bytes(&self) -> usize {
        LAYER_BYTES
    }
    fn export(&self, block: BlockId, layers: Range<u32>, out: SpanMut<'_>) -> Result<(), SourceError> {
        let out = out.host().expect("no staging was given");
        for (layer, part) in layers.zip(out.chunks_mut(LAYER_BYTES)) {
            part.copy_from_slice(&pattern(block, layer));
        }
        Ok(())
    }
}

/// The same blocks in device memory. An export is launched and waited for.
#[derive(Debug)]
pub(super) struct DeviceSource(Stream);

impl DeviceSource {
    pub fn new() -> Self {
        Self(Stream::new())
    }
}

impl KvSource for DeviceSource {
    fn layer_count(&self) -> u32 {
        LAYERS
    }
    fn layer_bytes(&self) -> usize {
        LAYER_BYTES
    }
    fn export(&self, block: BlockId, layers: Range<u32>, out: SpanMut<'_>) -> Result<(), SourceError> {
        let bytes = move || layers.flat_map(|layer| pattern(block, layer)).collect::<Vec<u8>>();
        match out {
            SpanMut::Host(out) => {
                let (copied, all) = mpsc::sync_channel(1);
                // The reader waits below.
                self.0.launch(move || copied.send(bytes()).unwrap());
                out.copy_from_slice(&all.recv().unwrap());
            }
            SpanMut::Device(span) => self.0.launch(move || {
                staged(&span).lock().unwrap()[..span.bytes].copy_from_slice(&bytes());
                span.ready.signal();
            }),
        }
        Ok(())
    }
    fn staging(&self, bytes: usize) -> Option<Arc<dyn SpanMemory>> {
        Some(Arc::new(Staged(Mutex::new(vec![0; bytes]))))
    }
}

#[test]
fn the_double_shows_who_does_not_wait() {
    let memory = Blocks::of(MemoryKind::Device);
    let (go_on, held) = mpsc::sync_channel::<()>(1);
    memory.after_writes(move || held.recv().unwrap());
    memory.write(BlockId(1), 0, Span::Host(&whole(BlockId(9))));
    assert_eq!(
        memory.get(BlockId(1)),
        None,
        "a reader that does not wait finds nothing"
    );
    go_on.send(()).unwrap();
    let (settled, all_written) = mpsc::sync_channel(1);
    memory.after_writes(move || settled.send(()).unwrap());
    all_written.recv().unwrap();
    assert_eq!(memory.get(BlockId(1)), Some(whole(BlockId(9))));
}
