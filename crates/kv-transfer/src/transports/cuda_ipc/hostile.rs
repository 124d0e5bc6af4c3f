//! Any bytes as a message on the socket of a pair: the checks of `kv_transfer::testing`.

use prost::Message as _;

use super::socket::{IpcGrant, IpcOffer};
use crate::transports::shm::hostile::round_trip;

pub(crate) fn check(bytes: &[u8]) {
    if let Ok(offer) = IpcOffer::decode(bytes) {
        let _ = (offer.check(), offer.key());
    }
    round_trip::<IpcGrant>(bytes);
}
