//! KV on a CUDA device, for tests: the device of the false driver (`crates/cuda-testkit`), opened once for the process. Its memory
//! cannot be touched by the host, and copies run late.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use serving_core::ids::BlockId;

use super::memory::whole;
use super::{BLOCK_BYTES, LAYER_BYTES, LAYERS};
use crate::device::{DeviceKv, DeviceLimits, DeviceParts};
use crate::span::{DeviceAddress, Lending, Lent, Span, SpanMut};
use crate::transport::{KvSource, SourceError};

/// The folder of the false libraries.
const VARIABLE: &str = "BATON_FALSE_CUDA";

/// Blocks of a pool: more than any ticket of the suite names.
pub(crate) const POOL_BLOCKS: u32 = 2112;

/// The driver and its device.
struct FalseCuda {
    libraries: Arc<cuda::Libraries>,
    device: Arc<cuda::Device>,
}

static FALSE_CUDA: LazyLock<FalseCuda> = LazyLock::new(|| {
    let folder = std::env::var_os(VARIABLE).unwrap_or_else(|| {
        panic!(
            "{VARIABLE} names no folder: build the false libraries with `cargo build -p false-cuda -p false-nccl`, and set it \
             to the folder in which libcuda.so and libnccl.so are then (target/debug)"
        )
    });
    let search = cuda::Search {
        explicit_folders: vec![folder.into()],
        ..cuda::Search::default()
    };
    let libraries = cuda::Libraries::find(&search);
    let device = cuda::Device::open(&libraries, 0);
    let device = device.unwrap_or_else(|error| panic!("{error}\n{}", libraries.report()));
    FalseCuda {
        libraries: Arc::new(libraries),
        device: Arc::new(device),
    }
});

/// Deadlines that a test waits for. The false driver interprets nothing here, so copies take microseconds.
pub(crate) fn limits() -> DeviceLimits {
    DeviceLimits {
        copy_wait: Duration::from_secs(5),
        communicator_wait: Duration::from_secs(5),
        group_wait: Duration::from_secs(5),
        abort_wait: Duration::from_secs(2),
    }
}

/// A new pool of so many blocks.
pub(crate) fn pool(blocks: u32) -> Arc<DeviceKv> {
    let memory = FALSE_CUDA
        .device
        .allocate(blocks as usize * BLOCK_BYTES)
        .expect("memory");
    let address = DeviceAddress(memory.ptr().0);
    let parts = DeviceParts {
        libraries: FALSE_CUDA.libraries.clone(),
        device: FALSE_CUDA.device.clone(),
        memory: Arc::new(memory),
        completed: Arc::new(Mutex::new(None::<cuda::Event>)),
        address,
    };
    DeviceKv::open(parts, limits()).expect("a pool")
}

fn place(kv: &DeviceKv, block: BlockId, start: usize) -> DeviceAddress {
    assert!(block.0 < POOL_BLOCKS, "{block} is not in the pool");
    kv.pool().offset(block.0 as usize * BLOCK_BYTES + start)
}

/// Waits until everything that was uploaded is there.
fn settle(kv: &DeviceKv) {
    while kv.is_uploading() {
        std::thread::park_timeout(Duration::from_millis(1));
    }
}

/// The sender's blocks, filled with the suite's pattern.
#[derive(Clone, Debug)]
pub(crate) struct CudaSource(Arc<DeviceKv>);

static SOURCE: LazyLock<CudaSource> = LazyLock::new(|| {
    let kv = pool(POOL_BLOCKS);
    let blocks: Vec<Vec<u8>> = (0..POOL_BLOCKS).map(|block| whole(BlockId(block))).collect();
    kv.upload(place(&kv, BlockId(0), 0), &blocks.concat())
        .expect("uploaded");
    settle(&kv);
    CudaSource(kv)
});

impl CudaSource {
    /// One for all tests, because they only read it.
    pub(crate) fn shared() -> Self {
        SOURCE.clone()
    }
    pub(crate) fn kv(&self) -> Arc<DeviceKv> {
        self.0.clone()
    }
}

impl KvSource for CudaSource {
    fn layer_count(&self) -> u32 {
        LAYERS
    }
    fn layer_bytes(&self) -> usize {
        LAYER_BYTES
    }
    fn export(&self, block: BlockId, layers: Range<u32>, out: SpanMut<'_>) -> Result<(), SourceError> {
        let failed = |source| SourceError { block, source };
        let out = out.host().map_err(|error| failed(error.into()))?;
        let from = place(&self.0, block, layers.start as usize * LAYER_BYTES);
        let (copied, _) = self.0.download(from, out);
        copied.map_err(|fault| failed(fault.into()))
    }
    fn lend(
        &self,
        block: BlockId,
        layers: Range<u32>,
        copy: &mut dyn FnMut(DeviceAddress) -> Lent,
    ) -> Result<Lending, SourceError> {
        copy(place(&self.0, block, layers.start as usize * LAYER_BYTES));
        Ok(Lending::Lent)
    }
}

/// The receiver's blocks.
#[derive(Clone, Debug)]
pub(super) struct CudaBlocks {
    kv: Arc<DeviceKv>,
    /// Blocks of which any byte counts as arrived.
    arrived: Arc<Mutex<BTreeSet<BlockId>>>,
}

impl CudaBlocks {
    pub fn new() -> Self {
        Self {
            kv: pool(POOL_BLOCKS),
            arrived: Arc::default(),
        }
    }
    pub fn kv(&self) -> Arc<DeviceKv> {
        self.kv.clone()
    }
    pub fn write(&self, block: BlockId, start: usize, data: Span<'_>) {
        let data = data.host().expect("bytes of the host");
        self.kv.upload(place(&self.kv, block, start), data).expect("uploaded");
        self.note(block);
    }
    pub fn lend(&self, block: BlockId, start: usize, copy: &mut dyn FnMut(DeviceAddress) -> Lent) {
        copy(place(&self.kv, block, start));
        self.note(block);
    }
    /// Bytes that the sender has written in place are good.
    pub fn note(&self, block: BlockId) {
        self.arrived.lock().unwrap().insert(block);
    }
    pub fn after_writes(&self, then: impl FnOnce() + Send + 'static) {
        let kv = self.kv.clone();
        std::thread::spawn(move || {
            settle(&kv);
            then();
        });
    }
    /// Whatever is there, arrived or not.
    pub fn bytes(&self, block: BlockId, range: Range<usize>) -> Vec<u8> {
        let mut bytes = vec![0; range.len()];
        let (copied, _) = self.kv.download(place(&self.kv, block, range.start), &mut bytes);
        copied.expect("downloaded");
        bytes
    }
    pub fn get(&self, block: BlockId) -> Option<Vec<u8>> {
        let has_arrived = self.arrived.lock().unwrap().contains(&block);
        has_arrived.then(|| self.bytes(block, 0..BLOCK_BYTES))
    }
    pub fn count(&self) -> usize {
        self.arrived.lock().unwrap().len()
    }
}
