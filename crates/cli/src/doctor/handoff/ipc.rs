//! CUDA IPC: memory of one process that another one opens, reads and writes, and the death of that other one.

use anyhow::{Context, bail};
use cuda::{DeviceMemory, ImportedMemory, IpcHandle};
use model_files::gguf::hex;

use super::here::Here;
use super::lane::Lane;
use super::peer::{Peer, be_peer, from_hex};
use crate::doctor::part::{Part, told};
use crate::doctor::pattern::Pattern;

/// What the memory holds at first, after the first process that opened it, and after the second.
const PATTERNS: [Pattern; 3] = [Pattern(1), Pattern(2), Pattern(3)];
const WROTE: &str = "wrote";
const CLOSED: &str = "closed";

/// Owns the memory and prints what was found.
///
/// # Errors
/// The GPU cannot be used.
pub(in crate::doctor) fn own_here(ordinal: u32) -> anyhow::Result<()> {
    let here = Here::open(ordinal)?;
    let memory = here.device.allocate(here.scale.bytes)?;
    let mut lane = Lane::new(&here)?;
    lane.fill(memory.ptr(), PATTERNS[0])?;
    let size = format!("{} KiB", here.scale.bytes >> 10);
    let exported = memory.ipc_handle().context("the memory cannot be exported");
    let handle = told("memory is exported", exported, |_| size)?;
    let Some(handle) = handle else { return Ok(()) };
    let owner = Owner {
        here: &here,
        memory: &memory,
        lane,
        handle: hex(&handle.0),
        ordinal,
    };
    owner.check()
}

struct Owner<'a> {
    here: &'a Here,
    memory: &'a DeviceMemory,
    lane: Lane,
    handle: String,
    ordinal: u32,
}

impl Owner<'_> {
    fn check(&self) -> anyhow::Result<()> {
        let [first, second, third] = PATTERNS;
        let both = |_: &Peer| "every byte is right in both".to_owned();
        let made = self.exchange(first, second);
        let Some(peer) = told("another process opens, reads and writes it", made, both)? else {
            return Ok(());
        };
        let killed = peer.kill();
        if told("that process is killed with the memory open", killed, |_| ended())?.is_none() {
            return Ok(());
        }
        let made = self.exchange(second, third);
        let Some(peer) = told("a second process opens, reads and writes it", made, both)? else {
            return Ok(());
        };
        told("it closes the memory", self.close(peer), |_| ended())?;
        Ok(())
    }

    /// Another process finds one pattern in the memory and leaves another one, which is found here. It has the memory open then.
    fn exchange(&self, before: Pattern, after: Pattern) -> anyhow::Result<Peer> {
        let scale = &self.here.scale;
        let mut peer = Peer::start(Part::IpcPeer.command(self.ordinal)?, scale.start)?;
        peer.tell(&format!("open {} {} {}", self.handle, before.0, after.0))?;
        peer.expect(WROTE, scale.exchange)?;
        let found = self.lane.expect(self.memory.ptr(), after);
        found.context("what the other process wrote")?;
        Ok(peer)
    }

    fn close(&self, mut peer: Peer) -> anyhow::Result<()> {
        peer.tell("close")?;
        peer.expect(CLOSED, self.here.scale.exchange)?;
        peer.end()
    }
}

fn ended() -> String {
    "it has ended".to_owned()
}

/// The other process. Dropped from the top: nothing is copied when the memory is closed.
struct Opener {
    opened: Option<ImportedMemory>,
    own: DeviceMemory,
    lane: Lane,
    here: Here,
}

/// Is the process that opens the memory.
///
/// # Errors
/// The GPU or the memory cannot be used, or a byte is wrong.
pub(in crate::doctor) fn open_here(ordinal: u32) -> anyhow::Result<()> {
    let open = || -> anyhow::Result<Opener> {
        let here = Here::open(ordinal)?;
        Ok(Opener {
            opened: None,
            own: here.device.allocate(here.scale.bytes)?,
            lane: Lane::new(&here)?,
            here,
        })
    };
    be_peer(open, |opener, words| match words {
        ["open", handle, before, after] => {
            let patterns = (Pattern(before.parse()?), Pattern(after.parse()?));
            opener.exchange(IpcHandle(from_hex(handle)?), patterns)
        }
        ["close"] => {
            opener.opened = None;
            Ok(CLOSED)
        }
        other => bail!("it was told {other:?}"),
    })
}

impl Opener {
    fn exchange(&mut self, handle: IpcHandle, (before, after): (Pattern, Pattern)) -> anyhow::Result<&'static str> {
        let opened = self.here.device.open_ipc(&handle)?;
        let shared = opened.ptr();
        self.opened = Some(opened);
        let own = self.own.ptr();
        self.lane.copy(own, shared)?;
        self.lane.expect(own, before).context("what the memory holds")?;
        self.lane.fill(own, after)?;
        self.lane.copy(shared, own)?;
        Ok(WROTE)
    }
}
