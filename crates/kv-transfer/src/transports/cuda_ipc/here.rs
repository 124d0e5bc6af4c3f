//! The pools that nodes of this process offer. The driver opens no handle in the process that made it, so a prefill node of the
//! same process uses such a pool by its address.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::DeviceKv;

static OFFERED: Mutex<BTreeMap<String, Arc<DeviceKv>>> = Mutex::new(BTreeMap::new());

fn offered_here() -> MutexGuard<'static, BTreeMap<String, Arc<DeviceKv>>> {
    OFFERED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A pool is offered as long as this value lives. The name is that of its socket.
#[derive(Debug)]
pub(super) struct OfferedHere(String);

pub(super) fn offer(socket: &str, kv: Arc<DeviceKv>) -> OfferedHere {
    offered_here().insert(socket.to_owned(), kv);
    OfferedHere(socket.to_owned())
}

/// `None`: the pool is another process's.
pub(super) fn find(socket: &str) -> Option<Arc<DeviceKv>> {
    offered_here().get(socket).cloned()
}

impl Drop for OfferedHere {
    fn drop(&mut self) {
        offered_here().remove(&self.0);
    }
}
