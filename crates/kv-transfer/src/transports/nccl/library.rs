//! What this transport needs of NCCL, so that its rules can be tested without it: communicators of two ranks, polled.

use std::fmt::Debug;
use std::net::{IpAddr, SocketAddr};

use super::fault::LibraryError;
use super::group::Run;

/// Bytes of a communicator's id (`NCCL_UNIQUE_ID_BYTES` of its header).
pub(super) const ID_BYTES: usize = 128;

/// The id of one communicator. The decode node mints it, when a prefill node wants one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CommunicatorId(pub [u8; ID_BYTES]);

impl CommunicatorId {
    /// Where the library of the node that minted it listens for the other rank: a socket address behind eight bytes of magic
    /// (`ncclBootstrapHandle` of NCCL 2.28). For people; `None` when this version writes it otherwise.
    pub fn listener(&self) -> Option<SocketAddr> {
        let family = u16::from_ne_bytes([self.0[8], self.0[9]]);
        let port = u16::from_be_bytes([self.0[10], self.0[11]]);
        let ip: IpAddr = match family {
            // AF_INET: the address follows the port.
            2 => <[u8; 4]>::try_from(&self.0[12..16]).ok()?.into(),
            // AF_INET6: the flow label is between them.
            10 => <[u8; 16]>::try_from(&self.0[16..32]).ok()?.into(),
            _ => return None,
        };
        Some(SocketAddr::new(ip, port))
    }
}

/// The two ranks. Connections are made towards the node that minted the id, as those of the handoff itself are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RankOf {
    Decode,
    Prefill,
}

impl RankOf {
    pub fn number(self) -> u32 {
        match self {
            RankOf::Decode => 0,
            RankOf::Prefill => 1,
        }
    }

    pub fn peer(self) -> Self {
        match self {
            RankOf::Decode => RankOf::Prefill,
            RankOf::Prefill => RankOf::Decode,
        }
    }
}

/// Which way bytes go between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Send,
    Receive,
}

/// NCCL, found and loaded.
pub(super) trait Library: Send + Sync + Debug {
    /// As the library says it. All ranks of a communicator need the same.
    fn version(&self) -> String;

    /// Opens a listener on the network, so it is called only for a pair that is wanted. For a blocking thread.
    fn mint(&self) -> Result<CommunicatorId, LibraryError>;

    /// Begins to make a communicator.
    fn begin(&self, id: &CommunicatorId, rank: RankOf) -> Result<Box<dyn Rank>, LibraryError>;
}

/// This process's rank of one communicator. No call but `abort` waits for the peer.
pub(super) trait Rank: Send {
    /// Whether it is made. Later: whether the library is at rest. An asynchronous error comes here.
    fn is_settled(&mut self) -> Result<bool, LibraryError>;

    /// Puts one group on this rank's stream. The peer posts the same runs the other way.
    fn post(&mut self, direction: Direction, runs: &[Run]) -> Result<(), LibraryError>;

    /// Whether the last group has run. For a sender that does not prove that its bytes have arrived.
    fn has_run(&mut self) -> Result<bool, LibraryError>;

    /// Ends everything, whatever runs. It may take for ever.
    ///
    /// # Errors
    /// The library could not end it: its exchange may go on, so nobody else may use its memory.
    fn abort(self: Box<Self>) -> Result<(), LibraryError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_listener_in_an_id_is_read_and_other_bytes_are_none() {
        let mut id = [0; ID_BYTES];
        id[8..10].copy_from_slice(&2u16.to_ne_bytes());
        id[10..12].copy_from_slice(&60187u16.to_be_bytes());
        id[12..16].copy_from_slice(&[192, 0, 2, 2]);
        let listener = CommunicatorId(id).listener();
        assert_eq!(listener, Some("192.0.2.2:60187".parse().unwrap()));
        id[8..10].copy_from_slice(&10u16.to_ne_bytes());
        id[16..32].copy_from_slice(&[0; 16]);
        id[31] = 1;
        assert_eq!(CommunicatorId(id).listener(), Some("[::1]:60187".parse().unwrap()));
        assert_eq!(CommunicatorId([7; ID_BYTES]).listener(), None);
    }
}
