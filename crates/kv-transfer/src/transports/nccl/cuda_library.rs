//! NCCL by the `cuda` crate's table of its functions. The only file of this transport that knows that crate.

use std::sync::Arc;

use cuda::nccl::{Communicator, Membership, Nccl, Progress, UniqueId};

use super::fault::LibraryError;
use super::group::Run;
use super::library::{CommunicatorId, Direction, Library, Rank, RankOf};
use crate::device::{DeviceKv, Event, Stream, pointer};

/// Ranks of a communicator: a pair's two nodes.
const RANKS: u32 = 2;
/// Thread blocks of a GPU that move the bytes of one communicator. They wait there for those of the peer, and so NCCL warns of
/// communicators that are used at the same time and do not fit the GPU together: two nodes may then wait for each other (NCCL
/// user guide, "Using multiple NCCL communicators concurrently"). By its own choice NCCL may take 32 between GPUs of one machine.
pub(super) const THREAD_BLOCKS_MAX: u32 = 4;

/// Takes the library that was found when the engine looked for it.
///
/// # Errors
/// It was not found, or it lacks a function.
pub(super) fn open(kv: &Arc<DeviceKv>) -> Result<Arc<dyn Library>, LibraryError> {
    let nccl = Nccl::open(kv.libraries())?;
    let kv = kv.clone();
    Ok(Arc::new(Loaded { nccl, kv }))
}

#[derive(Debug)]
struct Loaded {
    nccl: Nccl,
    kv: Arc<DeviceKv>,
}

impl Library for Loaded {
    fn version(&self) -> String {
        self.nccl.version().to_string()
    }

    fn mint(&self) -> Result<CommunicatorId, LibraryError> {
        Ok(CommunicatorId(self.nccl.unique_id()?.0))
    }

    fn begin(&self, id: &CommunicatorId, rank: RankOf) -> Result<Box<dyn Rank>, LibraryError> {
        // Before the communicator, so that nothing of it is left when one of them is refused.
        let (stream, done) = (self.kv.stream()?, self.kv.event()?);
        let membership = Membership {
            id: UniqueId(id.0),
            rank: rank.number(),
            ranks: RANKS,
            ctas_max: Some(THREAD_BLOCKS_MAX),
        };
        Ok(Box::new(CudaRank {
            communicator: self.nccl.begin(self.kv.device(), &membership)?,
            stream,
            done,
            peer: rank.peer(),
            posted: Posted::Nothing,
        }))
    }
}

/// One rank and its stream. Exchanges run beside the engine's kernels.
struct CudaRank {
    communicator: Communicator,
    stream: Stream,
    /// Comes when the exchange has run.
    done: Event,
    peer: RankOf,
    posted: Posted,
}

/// The exchange under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Posted {
    Nothing,
    /// The library may not have put it on the stream yet.
    Launching,
    /// It is on the stream, before the event.
    Running,
}

impl Rank for CudaRank {
    fn is_settled(&mut self) -> Result<bool, LibraryError> {
        Ok(self.communicator.poll()? == Progress::Done)
    }

    fn post(&mut self, direction: Direction, runs: &[Run]) -> Result<(), LibraryError> {
        let peer = self.peer.number();
        self.communicator.group(&self.stream, |group| {
            runs.iter().try_for_each(|run| match direction {
                Direction::Send => group.send(pointer(run.at), run.bytes, peer),
                Direction::Receive => group.recv(pointer(run.at), run.bytes, peer),
            })
        })?;
        self.posted = Posted::Launching;
        Ok(())
    }

    fn has_run(&mut self) -> Result<bool, LibraryError> {
        match self.posted {
            Posted::Nothing => return Ok(true),
            Posted::Launching => {
                if self.is_settled()? {
                    self.stream.record(&self.done)?;
                    self.posted = Posted::Running;
                }
            }
            Posted::Running => {
                if self.done.is_done()? {
                    self.posted = Posted::Nothing;
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    fn abort(self: Box<Self>) -> Result<(), LibraryError> {
        // The stream and the event are dropped afterwards: after a good abort nothing of the communicator is on them any more.
        let Self {
            communicator,
            stream,
            done,
            ..
        } = *self;
        let aborted = communicator.abort();
        drop((stream, done));
        Ok(aborted?)
    }
}
