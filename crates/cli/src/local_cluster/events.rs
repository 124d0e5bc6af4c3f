//! What the processes of a local cluster do, told to whoever shows it.

use std::fmt;
use std::sync::Arc;

use super::kind::ProcessKind;

/// An event of a process of the cluster, for display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClusterEvent {
    EtcdStarted {
        address: String,
        pid: u32,
    },
    Started {
        name: String,
        kind: ProcessKind,
        pid: u32,
    },
    /// It has packed so much of its weights. Not sent when that is quick.
    Packing {
        name: String,
        done_bytes: u64,
        total_bytes: u64,
    },
    Listening {
        name: String,
        address: String,
    },
    Ready {
        name: String,
    },
    /// Every process has started. Sent when the list of what the cluster still lacks changes.
    Waiting {
        what: String,
    },
    /// One line of its stderr.
    Line {
        name: String,
        line: String,
    },
}

/// Gets every [`ClusterEvent`], in order for each process. It must not block, because it runs on the readers' tasks.
#[derive(Clone, Default)]
pub struct Observer(Option<Arc<Observe>>);

type Observe = dyn Fn(&ClusterEvent) + Send + Sync;

impl Observer {
    pub fn new(observe: impl Fn(&ClusterEvent) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(observe)))
    }

    pub fn tell(&self, event: &ClusterEvent) {
        if let Some(observe) = &self.0 {
            observe(event);
        }
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Observer").field(&self.0.is_some()).finish()
    }
}
