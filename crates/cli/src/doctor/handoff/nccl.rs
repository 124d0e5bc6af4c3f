//! NCCL: a communicator of two processes exchanges bytes, one of them is killed while the other sends, receives, or makes the
//! communicator, and each time the next communicator of the same process has to work.

use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use cuda::nccl::{NcclError, UniqueId};
use model_files::gguf::hex;

use super::add_variables;
use super::peer::{Peer, be_peer, from_hex};
use super::rank::{Group, Joined, Rank};
use crate::doctor::part::{Part, told};

const RIGHT: &str = "right";
const JOINED: &str = "joined";
const CLOSED: &str = "closed";

/// Is the first rank of each communicator, starts the second ones, and prints what was found.
///
/// # Errors
/// The GPU or NCCL cannot be used.
pub(in crate::doctor) fn first_here(ordinals: (u32, u32)) -> anyhow::Result<()> {
    let first = First {
        rank: Rank::open(ordinals.0, 0)?,
        ordinals,
    };
    first.check()
}

struct First {
    rank: Rank,
    /// Of the first and of the second rank.
    ordinals: (u32, u32),
}

/// A communicator with a living peer.
struct Session {
    peer: Peer,
    joined: Joined,
}

impl First {
    /// Ends at the first thing that is wrong.
    fn check(&self) -> anyhow::Result<()> {
        let kib = self.rank.here.scale.bytes >> 10;
        let (first, second) = self.ordinals;
        let exchange = format!("{kib} KiB both ways between two processes, GPU {first} and GPU {second}");
        let Some(session) = told_session(&exchange, self.session(1))? else {
            return Ok(());
        };
        let sending = self.killed_while(session, Group::Send);
        if !is_told("the peer is killed while this process sends", sending)? {
            return Ok(());
        }
        let Some(session) = told_session("the next communicator", self.session(2))? else {
            return Ok(());
        };
        let receiving = self.killed_while(session, Group::Receive);
        if !is_told("the peer is killed while this process receives", receiving)? {
            return Ok(());
        }
        if !is_told("the peer is killed before it joins", self.killed_in_init())? {
            return Ok(());
        }
        let Some(session) = told_session("the next communicator", self.session(3))? else {
            return Ok(());
        };
        is_told("both close it", self.close(session))?;
        Ok(())
    }

    fn start_peer(&self) -> anyhow::Result<Peer> {
        let mut command = Part::NcclPeer.command(self.ordinals.1)?;
        add_variables(&mut command, 1, self.ordinals);
        Peer::start(command, self.rank.here.scale.start)
    }

    /// A new peer, a new communicator with it, and an exchange.
    fn session(&self, round: u64) -> anyhow::Result<Session> {
        let scale = self.rank.here.scale;
        let mut peer = self.start_peer()?;
        let id = self.rank.nccl.unique_id()?;
        peer.tell(&format!("join {}", hex(&id.0)))?;
        let joined = self.rank.meet(id).map_err(|error| peer.beside(error))?;
        let mut session = Session { peer, joined };
        match session.exchange(&self.rank, round, scale.meet) {
            Ok(()) => Ok(session),
            Err(error) => {
                let Session { peer, joined } = session;
                drop(peer);
                match self.rank.abort(joined) {
                    Ok(_) => Err(error),
                    Err(abort) => Err(anyhow!("{error:#}; and then: {abort:#}")),
                }
            }
        }
    }

    /// The group cannot end by itself, unless NCCL has taken all bytes of a send: the local end of a send is no arrival.
    fn killed_while(&self, session: Session, group: Group) -> anyhow::Result<String> {
        let Session { peer, mut joined } = session;
        self.rank.post(&mut joined, group)?;
        let killed_at = peer.kill()?;
        let noticed = joined.is_over_by(killed_at + self.rank.here.scale.patience);
        let noticed = match noticed {
            Ok(true) => "the group had ended here".to_owned(),
            Ok(false) => silent(self.rank.here.scale.patience),
            Err(error) => format!("NCCL said: {error}"),
        };
        let took = self.rank.abort(joined)?;
        Ok(after_the_kill(&noticed, took, killed_at))
    }

    fn killed_in_init(&self) -> anyhow::Result<String> {
        let peer = self.start_peer()?;
        let id = self.rank.nccl.unique_id()?;
        let mut communicator = self.rank.begin(id)?;
        let killed_at = peer.kill()?;
        let noticed = communicator.wait_until(killed_at + self.rank.here.scale.patience);
        let took = self.rank.end(communicator)?;
        let noticed = match noticed {
            Ok(()) => bail!("a communicator of two ranks was made with one"),
            Err(NcclError::Deadline { .. }) => silent(self.rank.here.scale.patience),
            Err(error) => format!("NCCL said: {error}"),
        };
        Ok(after_the_kill(&noticed, took, killed_at))
    }

    fn close(&self, session: Session) -> anyhow::Result<String> {
        let Session { mut peer, joined } = session;
        peer.tell("close")?;
        self.rank.close(joined)?;
        peer.expect(CLOSED, self.rank.here.scale.exchange)?;
        peer.end()?;
        Ok("both have ended it".to_owned())
    }
}

impl Session {
    fn exchange(&mut self, rank: &Rank, round: u64, within: Duration) -> anyhow::Result<()> {
        self.peer.expect(JOINED, within)?;
        self.peer.tell(&format!("exchange {round}"))?;
        let exchanged = rank.exchange(&mut self.joined, round);
        exchanged.map_err(|error| self.peer.beside(error))?;
        self.peer.expect(RIGHT, rank.here.scale.exchange)
    }
}

fn told_session(what: &str, made: anyhow::Result<Session>) -> anyhow::Result<Option<Session>> {
    told(what, made, |_| "every byte is right in both".to_owned())
}

fn is_told(what: &str, made: anyhow::Result<String>) -> anyhow::Result<bool> {
    Ok(told(what, made, String::clone)?.is_some())
}

fn silent(patience: Duration) -> String {
    format!("NCCL said nothing for {:.1} s", patience.as_secs_f64())
}

fn after_the_kill(noticed: &str, abort_took: Duration, killed_at: Instant) -> String {
    format!(
        "{noticed}; the abort took {:.3} s and returned {:.3} s after the kill",
        abort_took.as_secs_f64(),
        killed_at.elapsed().as_secs_f64()
    )
}

/// Dropped from the top.
struct Second {
    joined: Option<Joined>,
    rank: Rank,
}

/// Is the second rank.
///
/// # Errors
/// The GPU or NCCL cannot be used, the first rank does not take part, or a byte is wrong.
pub(in crate::doctor) fn second_here(ordinal: u32) -> anyhow::Result<()> {
    let open = || -> anyhow::Result<Second> {
        Ok(Second {
            joined: None,
            rank: Rank::open(ordinal, 1)?,
        })
    };
    be_peer(open, |second, words| match words {
        ["join", id] => {
            second.joined = Some(second.rank.meet(UniqueId(from_hex(id)?))?);
            Ok(JOINED)
        }
        ["exchange", round] => {
            let joined = second.joined.as_mut().context("there is no communicator")?;
            second.rank.exchange(joined, round.parse()?)?;
            Ok(RIGHT)
        }
        ["close"] => {
            let joined = second.joined.take().context("there is no communicator")?;
            second.rank.close(joined)?;
            Ok(CLOSED)
        }
        other => bail!("it was told {other:?}"),
    })
}
