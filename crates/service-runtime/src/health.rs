//! Whether a process is ready, with one answer for HTTP (`/health`, `/ready`) and gRPC health.

use std::sync::Arc;

use tokio::sync::watch;

/// Shared by the task that knows it and the endpoints that report it.
#[derive(Clone, Debug)]
pub struct Health {
    state: Arc<watch::Sender<ReadyState>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadyState {
    Ready,
    /// Why it is not ready, in words on which a person can act.
    NotReady(String),
    Draining,
}

impl ReadyState {
    pub fn is_ready(&self) -> bool {
        *self == ReadyState::Ready
    }
    /// The state without its reason.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            ReadyState::Ready => "ready",
            ReadyState::NotReady(_) => "not_ready",
            ReadyState::Draining => "draining",
        }
    }
    pub fn words(&self) -> &str {
        match self {
            ReadyState::Ready => "ready",
            ReadyState::NotReady(why) => why,
            ReadyState::Draining => "draining",
        }
    }
}

impl Health {
    pub fn new(why_not_yet: &str) -> Self {
        let (state, _) = watch::channel(ReadyState::NotReady(why_not_yet.to_owned()));
        Self { state: Arc::new(state) }
    }
    /// A draining process never becomes ready again.
    pub fn set(&self, next: ReadyState) {
        self.state.send_if_modified(|state| {
            let changes = *state != ReadyState::Draining && *state != next;
            if changes {
                *state = next;
            }
            changes
        });
    }
    pub fn get(&self) -> ReadyState {
        self.state.borrow().clone()
    }
    pub fn watch(&self) -> watch::Receiver<ReadyState> {
        self.state.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draining_is_final() {
        let health = Health::new("no coordinator yet");
        assert!(!health.get().is_ready());
        health.set(ReadyState::Ready);
        assert!(health.get().is_ready());
        health.set(ReadyState::Draining);
        health.set(ReadyState::Ready);
        assert_eq!(health.get(), ReadyState::Draining);
    }
}
