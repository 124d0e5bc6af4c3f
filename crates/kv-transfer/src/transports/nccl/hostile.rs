//! Any bytes as a message on the control stream of a pair: the checks of `kv_transfer::testing`.

use prost::Message as _;

use super::group::{FRAMES_MAX, RingShape};
use super::messages::{NcclOffer, ToDecode, ToDecodeWire, ToPrefill, ToPrefillWire};

const RING: RingShape = RingShape {
    slots: 16,
    slot_bytes: 2 << 20,
};

pub(crate) fn check(bytes: &[u8]) {
    if let Some(message) = ToDecodeWire::decode(bytes)
        .ok()
        .and_then(|wire| ToDecode::try_from(wire).ok())
    {
        let again = ToDecode::try_from(ToDecodeWire::from(message.clone()));
        assert_eq!(again.as_ref(), Ok(&message));
        if let ToDecode::Group(group) = message
            && group.check(RING).is_ok()
        {
            assert!(group.blocks.len() <= FRAMES_MAX && group.run_bytes.len() <= group.blocks.len());
            assert!(group.bytes() <= RING.bytes());
        }
    }
    if let Some(message) = ToPrefillWire::decode(bytes)
        .ok()
        .and_then(|wire| ToPrefill::try_from(wire).ok())
    {
        assert_eq!(ToPrefill::try_from(ToPrefillWire::from(message.clone())), Ok(message));
    }
    if let Ok(offer) = NcclOffer::decode(bytes) {
        let ring = offer.ring();
        assert!(!ring.is_sound() || ring.bytes() <= 1 << 30);
    }
}
