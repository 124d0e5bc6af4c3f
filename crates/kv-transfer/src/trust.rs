//! Trust between nodes that one `baton up` started: the secret that they hold, and what it lets them do to each other's memory.

use std::str::FromStr;
use std::sync::Arc;

use serde::{Serialize, Serializer};
use sha2::{Digest as _, Sha256};
use thiserror::Error;

use crate::device::DeviceKv;
use crate::receiver::{MappedPool, WrittenPool};

/// A nonce or a proof.
pub(crate) type Word32 = [u8; 32];

/// What a prefill node needs to write its peers' pools in place.
#[derive(Clone, Debug)]
pub struct DirectWish {
    pub secret: DirectSecret,
    /// The shape of this node's own blocks. Only pools of the same shape are written.
    pub layers: u32,
    pub layer_bytes: u32,
}

/// What a decode node lets senders that hold the same secret do: write its pool in place.
#[derive(Clone, Debug)]
pub struct DirectOffer {
    pub secret: DirectSecret,
    pub pool: Arc<dyn MappedPool>,
    /// Both ends sum every frame. Without it a fault of the memory or of this program is not noticed.
    pub has_checksums: bool,
}

/// A node's KV on a CUDA device, as its transports use it.
#[derive(Clone, Debug)]
pub struct DeviceEnd {
    pub kv: Arc<DeviceKv>,
    /// Decode nodes: where senders of this host that hold the same secret may write in place.
    pub in_place: Option<DevicePlace>,
    /// Decode nodes: both ends sum every frame. The device's bytes come to the host for it.
    pub has_checksums: bool,
}

/// A pool on a device that trusted senders write in place.
#[derive(Clone, Debug)]
pub struct DevicePlace {
    pub secret: DirectSecret,
    pub pool: Arc<dyn WrittenPool>,
}

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
pub(crate) enum Prover {
    Sender,
    Receiver,
}

impl DirectSecret {
    /// The proof for one conversation and one end of it. The secret is at both ends of the hashed text, so that nothing can
    /// be appended.
    pub(crate) fn proof(&self, prover: Prover, nonces: [&Word32; 2]) -> Word32 {
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
    pub(crate) fn is_proof(&self, proof: &Word32, prover: Prover, nonces: [&Word32; 2]) -> bool {
        let expected = self.proof(prover, nonces);
        let differing = expected.iter().zip(proof).fold(0, |all, (a, b)| all | (a ^ b));
        std::hint::black_box(differing) == 0
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
}
