//! The pools of other processes that this process has open. The driver opens an allocation once, so all lives of a pair, and all
//! pairs with one decode node, share one opening. It is closed with its last user.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::device::{DeviceFault, DeviceKv, IPC_HANDLE_BYTES, ImportedMemory};
use crate::span::DeviceAddress;

/// How long an opening waits for a closing of the same pool. The driver closes in milliseconds.
const CLOSING_TIME_LIMIT: Duration = Duration::from_secs(1);

/// A pool: two containers may have processes of one number, and a number may come again, so none is in the key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PoolKey {
    pub pid_namespace: u64,
    /// UUID of the device that has it.
    pub device: String,
    /// Of its node, drawn at the node's start.
    pub socket: String,
}

type Openings = BTreeMap<PoolKey, Weak<Opened>>;

static OPENINGS: Mutex<Openings> = Mutex::new(BTreeMap::new());
static CLOSED: Condvar = Condvar::new();

fn openings() -> MutexGuard<'static, Openings> {
    OPENINGS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One opening.
#[derive(Debug)]
pub(super) struct Opened {
    key: PoolKey,
    memory: Option<ImportedMemory>,
    address: DeviceAddress,
}

impl Opened {
    /// For a blocking thread.
    ///
    /// # Errors
    /// The driver refuses: the process is gone, or the two devices do not reach each other.
    pub fn of(device: &DeviceKv, key: PoolKey, handle: [u8; IPC_HANDLE_BYTES]) -> Result<Arc<Self>, DeviceFault> {
        let is_closing = |openings: &mut Openings| openings.get(&key).is_some_and(|opened| opened.strong_count() == 0);
        let waited = CLOSED.wait_timeout_while(openings(), CLOSING_TIME_LIMIT, is_closing);
        let mut openings = waited.unwrap_or_else(PoisonError::into_inner).0;
        if let Some(opened) = openings.get(&key).and_then(Weak::upgrade) {
            return Ok(opened);
        }
        let memory = device.import(handle)?;
        let opened = Arc::new(Self {
            key: key.clone(),
            address: DeviceAddress(memory.ptr().0),
            memory: Some(memory),
        });
        openings.insert(key, Arc::downgrade(&opened));
        Ok(opened)
    }

    /// The first byte of the pool.
    pub fn address(&self) -> DeviceAddress {
        self.address
    }
}

/// Pools of other processes that are open now.
#[cfg(test)]
pub(super) fn open_count() -> usize {
    openings().values().filter(|opened| opened.strong_count() > 0).count()
}

impl Drop for Opened {
    fn drop(&mut self) {
        // Closed before anybody else can open it.
        let mut openings = openings();
        drop(self.memory.take());
        openings.remove(&self.key);
        drop(openings);
        CLOSED.notify_all();
    }
}
