//! One server-sent event as bytes.

use serde::Serialize;

/// Writes an event with this data. An event of a kind has a line with its name.
pub fn write_event(bytes: &mut Vec<u8>, kind: Option<&str>, data: &impl Serialize) {
    if let Some(kind) = kind {
        bytes.extend_from_slice(b"event: ");
        bytes.extend_from_slice(kind.as_bytes());
        bytes.push(b'\n');
    }
    bytes.extend_from_slice(b"data: ");
    let data_at = bytes.len();
    if let Err(error) = serde_json::to_writer(&mut *bytes, data) {
        // Writing fails only for maps whose keys are not strings, and no answer has one.
        tracing::error!(%error, "an event could not be written as JSON");
    }
    // What a client wrote is repeated as it was written. Between the parts of JSON the end of a line is a space, and here it
    // would end the event's data.
    for byte in bytes
        .iter_mut()
        .skip(data_at)
        .filter(|byte| matches!(**byte, b'\n' | b'\r'))
    {
        *byte = b' ';
    }
    bytes.extend_from_slice(b"\n\n");
}
