//! KV frames on their gRPC stream, without the two copies that a general codec makes. A block's bytes leave as the buffer
//! into which they were exported, and arrive as a slice of what HTTP/2 received. The bytes are those that any gRPC library
//! sends and reads (a length-prefixed message: a zero byte, the length as u32 big endian, the message;
//! <https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md>).

use std::collections::VecDeque;

use bytes::{Buf, BufMut as _, Bytes, BytesMut};
use prost::Message as _;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint};
use thiserror::Error;
use tonic::Status;

use crate::convert::ConvertError;
use crate::messages::{KV_FRAME_BYTES_MAX, KvFrame};
use crate::v1;

/// gRPC's own name of the service, and the path of its one method.
pub const SERVICE: &str = "baton.v1.HandoffService";
pub const PUSH_PATH: &str = "/baton.v1.HandoffService/Push";

/// A compression flag and a length precede each message.
const PREFIX_BYTES: usize = 5;
/// Field numbers of handoff.proto. `data` is the block's last field, so it may be written after all others.
const KV_FRAME_BLOCK: u32 = 3;
const KV_BLOCK_DATA: u32 = 9;
/// A key below 16 and a varint of a length.
const FIELD_START_BYTES_MAX: usize = 1 + 10;

/// A frame in the form in which it goes on the stream. The second part is a block's bytes, uncopied, and empty for every
/// other frame.
pub fn encode(frame: KvFrame) -> [Bytes; 2] {
    let mut wire = v1::KvFrame::from(frame);
    let Some(v1::kv_frame::Frame::Block(block)) = &mut wire.frame else {
        let message_bytes = wire.encoded_len();
        let mut head = start(message_bytes, message_bytes);
        // Never fails: the buffer grows.
        let _ = wire.encode(&mut head);
        return [head.freeze(), Bytes::new()];
    };
    let data = std::mem::take(&mut block.data);
    let field_bytes = |length: usize| 1 + encoded_len_varint(length as u64) + length;
    let data_field_bytes = if data.is_empty() { 0 } else { field_bytes(data.len()) };
    let block_bytes = block.encoded_len() + data_field_bytes;
    let mut head = start(
        field_bytes(block_bytes),
        block.encoded_len() + 2 * FIELD_START_BYTES_MAX,
    );
    encode_key(KV_FRAME_BLOCK, WireType::LengthDelimited, &mut head);
    encode_varint(block_bytes as u64, &mut head);
    let _ = block.encode(&mut head);
    if !data.is_empty() {
        encode_key(KV_BLOCK_DATA, WireType::LengthDelimited, &mut head);
        encode_varint(data.len() as u64, &mut head);
    }
    [head.freeze(), data]
}

/// A buffer for `room_bytes` of a message whose length is `message_bytes`.
fn start(message_bytes: usize, room_bytes: usize) -> BytesMut {
    let mut head = BytesMut::with_capacity(PREFIX_BYTES + room_bytes);
    head.put_u8(0);
    // No frame comes near 4 GiB: a single layer is the largest part that is never cut.
    head.put_u32(u32::try_from(message_bytes).unwrap_or(u32::MAX));
    head
}

/// Why a stream cannot be read further.
#[derive(Debug, Error)]
pub enum StreamError {
    #[error("a frame is marked as compressed on a stream that has no compression")]
    Compressed,
    #[error("a frame of {bytes} bytes is longer than the {KV_FRAME_BYTES_MAX} a frame may have")]
    TooLong { bytes: u32 },
    #[error("not a KV frame: {0}")]
    NotAFrame(#[from] prost::DecodeError),
    #[error("{0}")]
    Contract(#[from] ConvertError),
}

impl StreamError {
    pub fn status(&self) -> Status {
        match self {
            StreamError::Compressed => Status::internal(self.to_string()),
            StreamError::TooLong { .. } => Status::out_of_range(self.to_string()),
            StreamError::NotAFrame(_) => Status::invalid_argument(self.to_string()),
            StreamError::Contract(error) => crate::status::convert_status(error),
        }
    }
}

/// Cuts a stream's bytes into frames. Holds at most one frame and the bytes that came with its end.
#[derive(Debug, Default)]
pub struct FrameReader {
    chunks: Chunks,
    /// Length of the message that is being received.
    message_bytes: Option<usize>,
}

impl FrameReader {
    pub fn add(&mut self, chunk: Bytes) {
        self.chunks.add(chunk);
    }

    /// Whether the stream may end here: no frame has begun.
    pub fn is_between_frames(&self) -> bool {
        self.message_bytes.is_none() && self.chunks.bytes == 0
    }

    /// The next whole frame. `None` until more bytes have come. A block's bytes are copied only when they came in pieces.
    ///
    /// # Errors
    /// [`StreamError`]: nothing more of this stream can be read.
    pub fn next_frame(&mut self) -> Result<Option<KvFrame>, StreamError> {
        let message_bytes = match self.message_bytes {
            Some(bytes) => bytes,
            None if self.chunks.remaining() < PREFIX_BYTES => return Ok(None),
            None => {
                self.chunks.close_tail();
                if self.chunks.get_u8() != 0 {
                    return Err(StreamError::Compressed);
                }
                let bytes = self.chunks.get_u32();
                *self.message_bytes.insert(checked_length(bytes)?)
            }
        };
        if self.chunks.remaining() < message_bytes {
            return Ok(None);
        }
        self.message_bytes = None;
        self.chunks.close_tail();
        let wire = v1::KvFrame::decode((&mut self.chunks).take(message_bytes))?;
        Ok(Some(KvFrame::try_from(wire)?))
    }
}

fn checked_length(bytes: u32) -> Result<usize, StreamError> {
    let length = usize::try_from(bytes).ok();
    length
        .filter(|length| *length <= KV_FRAME_BYTES_MAX)
        .ok_or(StreamError::TooLong { bytes })
}

/// A smaller piece is copied to its neighbours, because each kept piece keeps the whole buffer with which it came.
const PIECE_BYTES_MIN: usize = 1024;

/// Bytes in the order in which they came. No piece is empty.
#[derive(Debug, Default)]
struct Chunks {
    queue: VecDeque<Bytes>,
    /// Small pieces after the queue.
    tail: BytesMut,
    bytes: usize,
}

impl Chunks {
    fn add(&mut self, chunk: Bytes) {
        self.bytes += chunk.len();
        if chunk.len() < PIECE_BYTES_MIN {
            self.tail.extend_from_slice(&chunk);
            return;
        }
        self.close_tail();
        self.queue.push_back(chunk);
    }

    /// Reading uses the queue alone.
    fn close_tail(&mut self) {
        if !self.tail.is_empty() {
            self.queue.push_back(self.tail.split().freeze());
        }
    }
}

impl Buf for Chunks {
    fn remaining(&self) -> usize {
        self.bytes
    }

    fn chunk(&self) -> &[u8] {
        self.queue.front().map_or(&[], |front| front.as_ref())
    }

    fn advance(&mut self, mut count: usize) {
        assert!(count <= self.bytes, "{count} of {} bytes", self.bytes);
        self.bytes -= count;
        while let Some(front) = self.queue.front_mut() {
            if count < front.len() {
                front.advance(count);
                return;
            }
            count -= front.len();
            self.queue.pop_front();
        }
    }

    /// Bytes in one piece are not copied.
    fn copy_to_bytes(&mut self, length: usize) -> Bytes {
        assert!(length <= self.bytes, "{length} of {} bytes", self.bytes);
        match self.queue.front_mut() {
            Some(front) if front.len() >= length => {
                self.bytes -= length;
                let piece = front.split_to(length);
                if front.is_empty() {
                    self.queue.pop_front();
                }
                piece
            }
            _ => {
                let mut whole = BytesMut::with_capacity(length);
                whole.put(self.take(length));
                whole.freeze()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serving_core::ids::{Attempt, BlockId, Generation, RequestId, TransferId};

    use super::*;
    use crate::messages::{KvBlockFrame, LastFrame};

    fn block(data: Bytes) -> KvFrame {
        KvFrame::Block(KvBlockFrame {
            transfer: TransferId(u128::MAX / 3),
            sequence_no: 300,
            ticket_index: 0,
            block: BlockId(17),
            generation: Generation(70_000),
            layer_begin: 0,
            layer_end: 30,
            checksum: 0x0123_4567_89ab_cdef,
            data,
        })
    }

    fn frames() -> Vec<KvFrame> {
        let transfer = TransferId(7);
        let data = |bytes: u32| Bytes::from((0..bytes).map(|i| i as u8).collect::<Vec<u8>>());
        let last = LastFrame {
            transfer,
            request: RequestId(9),
            attempt: Attempt(1),
            block_count: 3,
            frame_count: 9,
            first_tokens: Vec::new(),
            traceparent: None,
            cached_tokens: None,
        };
        let mut frames = vec![KvFrame::Begin { transfer }];
        frames.extend([0, 1, 127, 128, 70_000].map(|bytes| block(data(bytes))));
        frames.push(KvFrame::Last(last));
        frames
    }

    fn joined(frame: KvFrame) -> Vec<u8> {
        encode(frame).concat()
    }

    /// As any other gRPC library writes it.
    #[test]
    fn a_frame_is_what_prost_and_grpc_make_of_it() {
        for frame in frames() {
            let message = v1::KvFrame::from(frame.clone()).encode_to_vec();
            let mut whole = vec![0];
            whole.extend((message.len() as u32).to_be_bytes());
            whole.extend(message);
            assert_eq!(joined(frame), whole);
        }
    }

    #[test]
    fn a_blocks_bytes_are_not_copied_on_either_side() {
        let data = Bytes::from(vec![3; 5000]);
        let [head, sent] = encode(block(data.clone()));
        assert_eq!(sent.as_ptr(), data.as_ptr());
        let mut reader = FrameReader::default();
        reader.add(head);
        reader.add(sent);
        match reader.next_frame() {
            Ok(Some(KvFrame::Block(block))) => assert_eq!(block.data.as_ptr(), data.as_ptr()),
            other => panic!("{other:?}"),
        }
    }

    proptest! {
        #[test]
        fn frames_are_read_however_they_are_cut(cuts in proptest::collection::vec(1usize..3000, 1..60)) {
            let sent = frames();
            let mut stream = Bytes::from(sent.iter().cloned().flat_map(joined).collect::<Vec<u8>>());
            let mut reader = FrameReader::default();
            let mut received = Vec::new();
            for cut in cuts.into_iter().cycle() {
                if stream.is_empty() {
                    break;
                }
                reader.add(stream.split_to(cut.min(stream.len())));
                while let Some(frame) = reader.next_frame().expect("a good stream") {
                    received.push(frame);
                }
            }
            prop_assert_eq!(received, sent);
        }
    }

    #[test]
    fn a_peer_that_sends_byte_by_byte_makes_no_heap_of_pieces() {
        let mut reader = FrameReader::default();
        reader.add(Bytes::from_static(&[0, 0, 0x10, 0, 0]));
        for _ in 0..0x0f_ffff {
            reader.add(Bytes::from_static(&[7]));
            assert!(matches!(reader.next_frame(), Ok(None)));
        }
        assert!(reader.chunks.queue.len() <= 1, "{} pieces", reader.chunks.queue.len());
        assert!(!reader.is_between_frames());
    }

    #[test]
    fn what_no_node_sends_is_refused() {
        let read = |bytes: &[u8]| {
            let mut reader = FrameReader::default();
            reader.add(Bytes::copy_from_slice(bytes));
            reader.next_frame()
        };
        assert!(matches!(read(&[1, 0, 0, 0, 0]), Err(StreamError::Compressed)));
        assert!(matches!(
            read(&[0, 0xff, 0, 0, 0]),
            Err(StreamError::TooLong { bytes: 0xff00_0000 })
        ));
        assert!(matches!(read(&[0, 0, 0, 0, 0]), Err(StreamError::Contract(_))));
        assert!(matches!(read(&[0, 0, 0, 0, 1, 0xff]), Err(StreamError::NotAFrame(_))));
        assert!(matches!(read(&[0, 0, 0, 0]), Ok(None)));
    }
}
