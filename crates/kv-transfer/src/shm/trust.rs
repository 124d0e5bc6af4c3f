//! Which process may write this node's blocks in place: one that holds the same secret, and whose exit can be watched.

use std::io;
use std::os::fd::OwnedFd;
use std::str::FromStr;

use rustix::process::{Pid, PidfdFlags};
use serde::{Serialize, Serializer};
use sha2::{Digest as _, Sha256};
use thiserror::Error;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;

use super::socket::Word32;

/// A secret that the nodes of one `baton up` know. It keeps clusters of one user apart and never travels. It does not
/// protect from that user's other programs, which may read the memory of these processes anyway.
#[derive(Clone, PartialEq, Eq)]
pub struct DirectSecret(Word32);

/// The text that is shown instead of the secret.
const REDACTED: &str = "redacted";

/// A mistake in the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("`{REDACTED}` stands for a secret that was not printed; give the secret itself")]
pub struct NoSecret;

impl FromStr for DirectSecret {
    type Err = NoSecret;
    /// Any text is a secret. An error about its form would show it.
    fn from_str(text: &str) -> Result<Self, NoSecret> {
        match text {
            REDACTED => Err(NoSecret),
            text => Ok(Self(Sha256::digest(text).into())),
        }
    }
}

impl std::fmt::Debug for DirectSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(REDACTED)
    }
}

impl Serialize for DirectSecret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(REDACTED)
    }
}

/// The end that proves that it holds the secret.
#[derive(Clone, Copy, Debug)]
pub(super) enum Prover {
    Sender,
    Receiver,
}

impl DirectSecret {
    /// The proof for one conversation and one end of it. The secret is at both ends of the hashed text, so that nothing can
    /// be appended.
    pub(super) fn proof(&self, prover: Prover, nonces: [&Word32; 2]) -> Word32 {
        let role = match prover {
            Prover::Sender => b'S',
            Prover::Receiver => b'R',
        };
        let mut hasher = Sha256::new();
        hasher.update(self.0);
        hasher.update([role]);
        hasher.update(nonces[0]);
        hasher.update(nonces[1]);
        hasher.update(self.0);
        hasher.finalize().into()
    }

    /// Compares in a time that does not show how much of it was right.
    pub(super) fn is_proof(&self, proof: &Word32, prover: Prover, nonces: [&Word32; 2]) -> bool {
        let expected = self.proof(prover, nonces);
        let differing = expected.iter().zip(proof).fold(0, |all, (a, b)| all | (a ^ b));
        std::hint::black_box(differing) == 0
    }
}

/// The process behind a socket, even after it is gone.
#[derive(Debug)]
pub(super) struct PeerProcess(AsyncFd<OwnedFd>);

impl PeerProcess {
    /// The process that made the connection. Its number may have been given to another process meanwhile. Only a process
    /// that still speaks on the socket afterwards is the right one.
    pub fn behind(socket: &UnixStream) -> io::Result<Self> {
        let pid = socket.peer_cred()?.pid().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        let process = rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK)?;
        // SAFETY: an `OwnedFd` is the same open descriptor for as long as it lives, and it lives inside the `AsyncFd`.
        let watched = unsafe { AsyncFd::register_with_interest(process, Interest::READABLE) };
        Ok(Self(watched.map_err(io::Error::from)?))
    }

    /// Waits for its exit. Then every thread and every mapping of it is gone.
    pub async fn exited(&self) {
        if self.0.readable().await.is_err() {
            // The runtime is ending, and this process with it.
            std::future::pending::<()>().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_good_for_one_secret_one_end_and_one_conversation() {
        let secret: DirectSecret = "of this start".parse().unwrap();
        let (ours, theirs) = ([1; 32], [2; 32]);
        let proof = secret.proof(Prover::Sender, [&ours, &theirs]);
        assert!(secret.is_proof(&proof, Prover::Sender, [&ours, &theirs]));
        assert!(!secret.is_proof(&proof, Prover::Receiver, [&ours, &theirs]));
        assert!(!secret.is_proof(&proof, Prover::Sender, [&theirs, &ours]));
        let other: DirectSecret = "of another start".parse().unwrap();
        assert!(!other.is_proof(&proof, Prover::Sender, [&ours, &theirs]));
        for bit in 0..256 {
            let mut changed = proof;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(
                !secret.is_proof(&changed, Prover::Sender, [&ours, &theirs]),
                "bit {bit}"
            );
        }
    }

    #[test]
    fn a_secret_is_never_shown_and_what_is_shown_is_none() {
        let secret: DirectSecret = "hush-hush".parse().unwrap();
        let shown = format!("{secret:?} {}", serde_json::to_string(&secret).unwrap());
        assert_eq!(shown, "redacted \"redacted\"");
        assert!("redacted".parse::<DirectSecret>().is_err());
    }

    #[tokio::test]
    async fn the_exit_of_the_process_behind_a_socket_is_noticed() {
        let name = format!("baton-kv-test-{:032x}", rand::random::<u128>());
        let listener = tokio::net::UnixListener::bind(super::super::socket::path(&name)).unwrap();
        let stream = UnixStream::connect(super::super::socket::path(&name)).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        let myself = PeerProcess::behind(&accepted).unwrap();
        drop(stream);
        let limit = std::time::Duration::from_millis(50);
        let gone = tokio::time::timeout(limit, myself.exited()).await;
        assert!(gone.is_err(), "this process runs, whatever its socket does");
    }
}
