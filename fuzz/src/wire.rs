//! Messages between the processes of a cluster: what is no message is a typed error, and what is one survives a round trip.

use std::fmt::Debug;

use bytes::Bytes;
use prost::Message;
use proto::kv_stream::{FrameReader, encode};
use proto::messages::{
    CoordinatorReport, DecodeEvent, KvFrame, KvReply, NodeReport, OpenRequest, PrefillEvent, PrefillRequest,
    StagedFrame, StagedReply,
};
use proto::v1;
use serving_core::node::Ticket;

use crate::choices::Choices;

/// The first byte says which message it is.
pub(crate) fn messages(data: &[u8]) {
    const KINDS: [fn(&[u8]); 11] = [
        round_trip::<v1::OpenRequest, OpenRequest>,
        round_trip::<v1::PrefillRequest, PrefillRequest>,
        round_trip::<v1::DecodeEvent, DecodeEvent>,
        round_trip::<v1::PrefillEvent, PrefillEvent>,
        round_trip::<v1::NodeReport, NodeReport>,
        round_trip::<v1::CoordinatorReport, CoordinatorReport>,
        round_trip::<v1::KvFrame, KvFrame>,
        round_trip::<v1::KvReply, KvReply>,
        round_trip::<v1::StagedFrame, StagedFrame>,
        round_trip::<v1::StagedReply, StagedReply>,
        round_trip::<v1::Ticket, Ticket>,
    ];
    let mut choices = Choices::of(data);
    let kind = choices.below(KINDS.len());
    KINDS[kind](choices.rest());
}

fn round_trip<W, M>(bytes: &[u8])
where
    W: Message + Default + From<M>,
    M: TryFrom<W> + Clone + PartialEq + Debug,
    M::Error: Debug,
{
    let Some(message) = W::decode(bytes).ok().and_then(|wire| M::try_from(wire).ok()) else {
        return;
    };
    let again = W::decode(&W::from(message.clone()).encode_to_vec()[..]).expect("what was encoded is decoded");
    assert_eq!(M::try_from(again).expect("what was taken once is taken again"), message);
}

/// The first byte says in how large pieces the others come.
pub(crate) fn kv_frames(data: &[u8]) {
    let mut choices = Choices::of(data);
    let piece_bytes = choices.below(256) + 1;
    let stream = choices.rest();
    let read = frames(stream, piece_bytes);
    assert_eq!(read, frames(stream, stream.len().max(1)), "another cut, other frames");
    for frame in read.0 {
        let sent = encode(frame.clone()).concat();
        assert_eq!(frames(&sent, piece_bytes), (vec![frame], true));
    }
}

/// The frames of a stream that comes in such pieces, and whether it may end there.
fn frames(stream: &[u8], piece_bytes: usize) -> (Vec<KvFrame>, bool) {
    let (mut reader, mut found) = (FrameReader::default(), Vec::new());
    for piece in stream.chunks(piece_bytes) {
        reader.add(Bytes::copy_from_slice(piece));
        loop {
            match reader.next_frame() {
                Ok(Some(frame)) => found.push(frame),
                Ok(None) => break,
                // Nothing more of such a stream is read.
                Err(_) => return (found, false),
            }
        }
    }
    (found, reader.is_between_frames())
}
