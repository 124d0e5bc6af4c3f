//! The decode node's double of the conformance suite: it grants reservations, keeps bytes and records every call.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use memmap2::{MmapOptions, MmapRaw};
use serving_core::ids::*;
use serving_core::kv::reservation::Reservation;
use serving_core::node::Ticket;
use tokio::sync::oneshot;

use super::false_cuda::POOL_BLOCKS;
use super::memory::{Blocks, MemoryKind, whole};
use super::{BLOCK_BYTES, LAYER_BYTES, LAYERS, key};
use crate::choice::TransportKind;
use crate::device::DeviceKv;
use crate::receiver::{
    Arrived, HandoffSink, ImportError, MappedPool, PoolShape, ReceiveEnd, TransferRefusal, WrittenPool,
};
use crate::span::{DeviceAddress, Lending, Lent, Span};

/// How the recording sink answers a commit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum CommitAnswer {
    Accept,
    Refuse,
    Never,
}

/// The decode node's double: it grants reservations, keeps bytes and records every call.
#[derive(Debug)]
pub(crate) struct Recorder {
    pub(crate) reservations: Mutex<BTreeMap<TransferId, Reservation>>,
    memory: Blocks,
    pub(super) commits: Mutex<Vec<Arrived>>,
    ended: Arc<Mutex<Vec<(TransferId, ReceiveEnd)>>>,
    pub(super) began: Mutex<Vec<TransferId>>,
    pub(super) progressed: Mutex<Vec<TransferId>>,
    answer: CommitAnswer,
    /// Imports wait while it is set.
    pub(crate) is_gated: AtomicBool,
    /// The memory into which senders that write in place write. It is made when it is asked for.
    pool: OnceLock<(OwnedFd, MmapRaw)>,
}

/// All blocks that a ticket of these tests names.
const POOL_SHAPE: PoolShape = PoolShape {
    blocks: 1 << 13,
    layers: LAYERS,
    layer_bytes: LAYER_BYTES as u32,
};

impl Recorder {
    fn pool(&self) -> &(OwnedFd, MmapRaw) {
        self.pool.get_or_init(|| {
            use rustix::fs::{MemfdFlags, SealFlags};
            let memory = rustix::fs::memfd_create("t-pool", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
            rustix::fs::ftruncate(&memory, POOL_SHAPE.bytes().unwrap() as u64).unwrap();
            let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
            rustix::fs::fcntl_add_seals(&memory, seals).unwrap();
            let map = MmapOptions::new().map_raw_read_only(&memory).unwrap();
            (memory, map)
        })
    }

    /// The bytes that a sender has written in place, verified or not.
    pub(crate) fn in_pool(&self, block: BlockId) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK_BYTES];
        let (memory, _) = self.pool();
        rustix::io::pread(memory, &mut bytes, u64::from(block.0) * BLOCK_BYTES as u64).unwrap();
        bytes
    }

    /// The device that has the blocks of a node with a CUDA device.
    pub(crate) fn device(&self) -> Option<Arc<DeviceKv>> {
        Some(self.memory.cuda()?.kv())
    }

    /// Imports wait here.
    fn pass_the_gate(&self) {
        while self.is_gated.load(Ordering::Relaxed) {
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }

    pub(crate) fn new(answer: CommitAnswer) -> Arc<Self> {
        Self::of((MemoryKind::Host, answer))
    }

    pub(crate) fn of((memory, answer): (MemoryKind, CommitAnswer)) -> Arc<Self> {
        Arc::new(Self {
            reservations: Mutex::default(),
            memory: Blocks::of(memory),
            commits: Mutex::default(),
            ended: Arc::default(),
            began: Mutex::default(),
            progressed: Mutex::default(),
            answer,
            is_gated: AtomicBool::new(false),
            pool: OnceLock::new(),
        })
    }
    pub(crate) fn reserve(&self, transfer: TransferId, sender: &NodeId, ticket: &Ticket) {
        let reservation = Reservation {
            transfer,
            key: key(transfer),
            sender: sender.clone(),
            blocks: ticket.blocks.clone(),
            layer_count: LAYERS,
            layer_bytes: LAYER_BYTES,
        };
        self.reservations.lock().unwrap().insert(transfer, reservation);
    }
    pub(crate) fn has_whole(&self, target: BlockId, source: BlockId) -> bool {
        self.memory.get(target).is_some_and(|bytes| bytes == whole(source))
    }
    pub(crate) fn ends(&self) -> Vec<(TransferId, ReceiveEnd)> {
        self.ended.lock().unwrap().clone()
    }
    pub(crate) fn commit_count(&self) -> usize {
        self.commits.lock().unwrap().len()
    }
    /// Blocks that any byte was written to.
    pub(crate) fn written(&self) -> usize {
        self.memory.count()
    }
    pub(super) fn has_any(&self, block: BlockId) -> bool {
        self.memory.get(block).is_some()
    }
}

#[async_trait]
impl HandoffSink for Recorder {
    fn claim(&self, transfer: TransferId, _: &NodeId) -> Result<Reservation, TransferRefusal> {
        self.reservations
            .lock()
            .unwrap()
            .remove(&transfer)
            .ok_or(TransferRefusal::UnknownTransfer)
    }
    fn began(&self, transfer: TransferId) {
        self.began.lock().unwrap().push(transfer);
    }
    fn progressed(&self, transfer: TransferId) {
        self.progressed.lock().unwrap().push(transfer);
    }
    fn import(&self, block: BlockId, layers: Range<u32>, data: Span<'_>) -> Result<(), ImportError> {
        self.pass_the_gate();
        self.memory.write(block, layers.start as usize * LAYER_BYTES, data);
        Ok(())
    }
    fn lend(
        &self,
        block: BlockId,
        layers: Range<u32>,
        copy: &mut dyn FnMut(DeviceAddress) -> Lent,
    ) -> Result<Lending, ImportError> {
        let Some(cuda) = self.memory.cuda() else {
            return Ok(Lending::NotOnDevice);
        };
        self.pass_the_gate();
        cuda.lend(block, layers.start as usize * LAYER_BYTES, copy);
        Ok(Lending::Lent)
    }
    async fn commit(&self, arrived: Arrived) -> Result<(), TransferRefusal> {
        // A step may read the blocks once this has returned, so bytes that are still on their way must arrive first.
        let (settled, all_written) = oneshot::channel();
        self.memory
            .after_writes(move || settled.send(()).expect("the commit waits below"));
        let _ = all_written.await;
        self.commits.lock().unwrap().push(arrived);
        match self.answer {
            CommitAnswer::Accept => Ok(()),
            CommitAnswer::Refuse => Err(TransferRefusal::NotCommitted {
                label: "cancelled",
                detail: "the client left".to_owned(),
            }),
            CommitAnswer::Never => std::future::pending().await,
        }
    }
    fn ended(&self, transfer: TransferId, _: TransportKind, end: ReceiveEnd) {
        // The blocks belong to another owner after this. Again, bytes that are on their way must arrive first.
        let ended = self.ended.clone();
        let then = move || ended.lock().unwrap().push((transfer, end));
        self.memory.after_writes(then);
    }
}

/// The pool of a node that trusts its senders. Bytes that verify count as arrived.
impl MappedPool for Recorder {
    fn memory(&self) -> BorrowedFd<'_> {
        self.pool().0.as_fd()
    }
}

impl WrittenPool for Recorder {
    fn shape(&self) -> PoolShape {
        match self.memory.cuda() {
            Some(_) => PoolShape {
                blocks: POOL_BLOCKS,
                ..POOL_SHAPE
            },
            None => POOL_SHAPE,
        }
    }
    fn verify(
        &self,
        block: BlockId,
        layers: Range<u32>,
        is_good: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Result<bool, ImportError> {
        if let Some(cuda) = self.memory.cuda() {
            let bytes = layers.start as usize * LAYER_BYTES..layers.end as usize * LAYER_BYTES;
            let is_good = is_good(&cuda.bytes(block, bytes));
            if is_good {
                self.pass_the_gate();
                cuda.note(block);
            }
            return Ok(is_good);
        }
        let span = POOL_SHAPE.span(block, &layers).unwrap();
        let (_, map) = self.pool();
        // SAFETY: inside the mapping, whose size is sealed. The test's sender writes no frame's bytes after its header.
        let bytes = unsafe { std::slice::from_raw_parts(map.as_ptr().add(span.start), span.len()) };
        let is_good = is_good(bytes);
        if is_good {
            self.import(block, layers, Span::Host(bytes))?;
        }
        Ok(is_good)
    }
}
