//! One of the two ranks of a communicator, with bounded waits: it meets the other one, exchanges bytes, and aborts.

use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};
use cuda::DeviceMemory;
use cuda::nccl::{Communicator, Membership, Nccl, NcclError, Progress, UniqueId};

use super::here::Here;
use super::lane::Lane;
use crate::doctor::pattern::Pattern;

const RANKS: u32 = 2;
const LOOK_EVERY: Duration = Duration::from_millis(1);

pub(super) struct Rank {
    pub nccl: Nccl,
    number: u32,
    sent: DeviceMemory,
    received: DeviceMemory,
    pub here: Here,
}

/// What a rank sends in a round.
fn pattern(rank: u32, round: u64) -> Pattern {
    Pattern(round * u64::from(RANKS) + u64::from(rank))
}

/// A communicator that is there, and its stream. The communicator is dropped first.
pub(super) struct Joined {
    communicator: Communicator,
    lane: Lane,
}

/// What a group is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Group {
    Both,
    Send,
    Receive,
}

impl Rank {
    /// # Errors
    /// There is no NCCL, or the GPU cannot be used.
    pub fn open(ordinal: u32, number: u32) -> anyhow::Result<Self> {
        let here = Here::open(ordinal)?;
        Ok(Self {
            nccl: Nccl::open(&here.libraries)?,
            number,
            sent: here.device.allocate(here.scale.bytes)?,
            received: here.device.allocate(here.scale.bytes)?,
            here,
        })
    }

    /// # Errors
    /// NCCL refuses.
    pub fn begin(&self, id: UniqueId) -> Result<Communicator, NcclError> {
        let membership = Membership {
            id,
            rank: self.number,
            ranks: RANKS,
            ctas_max: None,
        };
        self.nccl.begin(&self.here.device, &membership)
    }

    /// Makes a communicator with the other rank, or aborts it.
    ///
    /// # Errors
    /// NCCL refuses, or the other rank does not come.
    pub fn meet(&self, id: UniqueId) -> anyhow::Result<Joined> {
        let lane = Lane::new(&self.here)?;
        let mut communicator = self.begin(id)?;
        let deadline = Instant::now() + self.here.scale.meet;
        match communicator.wait_until(deadline) {
            Ok(()) => Ok(Joined { communicator, lane }),
            Err(error) => Err(self.aborted_after(communicator, error.into())),
        }
    }

    /// Both ranks send and receive. Every byte is compared.
    ///
    /// # Errors
    /// NCCL or the device has failed, the other rank does not take part, or a byte is wrong.
    pub fn exchange(&self, joined: &mut Joined, round: u64) -> anyhow::Result<()> {
        let mine = pattern(self.number, round);
        joined.lane.fill(self.sent.ptr(), mine)?;
        // Not what is expected, so that bytes which never came are seen.
        joined.lane.fill(self.received.ptr(), mine)?;
        self.post(joined, Group::Both)?;
        let deadline = Instant::now() + self.here.scale.exchange;
        let is_over = joined.is_over_by(deadline)?;
        ensure!(
            is_over,
            "an exchange had not ended after {} s",
            self.here.scale.exchange.as_secs()
        );
        let theirs = pattern(self.other(), round);
        joined.lane.expect(self.received.ptr(), theirs).context("what came")
    }

    /// Gives a group to the stream. The other rank need not have one.
    ///
    /// # Errors
    /// NCCL refuses.
    pub fn post(&self, joined: &mut Joined, group: Group) -> Result<(), NcclError> {
        let (bytes, peer) = (self.here.scale.bytes, self.other());
        let Joined { communicator, lane } = joined;
        communicator.group(lane.stream(), |open| {
            if group != Group::Receive {
                open.send(self.sent.ptr(), bytes, peer)?;
            }
            if group != Group::Send {
                open.recv(self.received.ptr(), bytes, peer)?;
            }
            Ok(())
        })?;
        Ok(())
    }

    fn other(&self) -> u32 {
        RANKS - 1 - self.number
    }

    /// Says goodbye. The other rank does so, too.
    ///
    /// # Errors
    /// NCCL has failed, or the other rank does not close. The communicator is aborted then.
    pub fn close(&self, joined: Joined) -> anyhow::Result<()> {
        let Joined { mut communicator, lane } = joined;
        let deadline = Instant::now() + self.here.scale.exchange;
        let closed = communicator.close().and_then(|()| communicator.wait_until(deadline));
        let ended = match closed {
            Ok(()) => Ok(()),
            Err(error) => Err(self.aborted_after(communicator, error.into())),
        };
        drop(lane);
        ended
    }

    /// Ends a communicator whatever runs. Its stream is dropped afterwards.
    ///
    /// # Errors
    /// As of [`end`](Self::end).
    pub fn abort(&self, joined: Joined) -> anyhow::Result<Duration> {
        let Joined { communicator, lane } = joined;
        let aborted = self.end(communicator);
        drop(lane);
        aborted
    }

    /// Aborts, and returns how long it took. After an abort that has failed the device is given up: to free memory is to wait for
    /// the work of NCCL, which may never end.
    ///
    /// # Errors
    /// It has not returned in time, or NCCL could not do it.
    pub fn end(&self, communicator: Communicator) -> anyhow::Result<Duration> {
        let aborted = abort_within(communicator, self.here.scale.abort);
        aborted.inspect_err(|_| self.here.device.give_up())
    }

    /// Aborts, and hands the error on that made it necessary.
    fn aborted_after(&self, communicator: Communicator, error: anyhow::Error) -> anyhow::Error {
        match self.end(communicator) {
            Ok(_) => error,
            Err(abort) => anyhow!("{error:#}; and then: {abort:#}"),
        }
    }
}

impl Joined {
    /// Waits for the group that was posted last. `false`: it is not over at the deadline.
    ///
    /// # Errors
    /// NCCL says that something has failed, which it need not do when the peer is dead.
    pub fn is_over_by(&mut self, deadline: Instant) -> Result<bool, NcclError> {
        let mut is_recorded = false;
        loop {
            let is_at_rest = self.communicator.poll()? == Progress::Done;
            if is_at_rest && !is_recorded {
                // Only now the group is on the stream, before the event.
                self.lane.record()?;
                is_recorded = true;
            }
            if is_recorded && self.lane.is_done()? {
                return Ok(true);
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
            thread::sleep(LOOK_EVERY);
        }
    }
}

/// On a thread that is given up when it takes too long: NCCL's abort may wait for the peer for ever.
fn abort_within(communicator: Communicator, limit: Duration) -> anyhow::Result<Duration> {
    let begun = Instant::now();
    let (told, hears) = sync_channel(1);
    let named = thread::Builder::new().name("doctor-abort".to_owned());
    let started = named.spawn(move || {
        // Nobody hears it who has given up.
        let _ = told.send(communicator.abort());
    });
    started.context("the system started no thread for an abort")?;
    match hears.recv_timeout(limit) {
        Ok(Ok(())) => Ok(begun.elapsed()),
        Ok(Err(error)) => Err(error).context("NCCL's abort failed"),
        Err(_) => bail!("NCCL's abort had not returned after {} s", limit.as_secs()),
    }
}
