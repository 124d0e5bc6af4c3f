//! Files of traffic that people pass on: traces of requests, and flight records, whose events go to a fresh coordinator's core.

use serving_core::cluster::{ClusterConfig, ClusterEvent};
use serving_core::time::Time;
use workload::flight_record::{EntryEncoder, Header, Reader, ReplayError, ReplayOptions, file_start, frame_of, replay};
use workload::trace::{ReadLimits, read};

use crate::choices::Choices;

const LIMITS: ReadLimits = ReadLimits {
    rows_max: 1_000,
    line_bytes_max: 4 << 10,
    bytes_max: 64 << 10,
};
/// The tokens of a prompt are read as a number and take four bytes each.
const PROMPT_TOKENS_MAX: u32 = 64 << 10;

pub(crate) fn trace(data: &[u8]) {
    let Ok(trace) = read("fuzz", &mut &data[..], &LIMITS) else {
        return;
    };
    assert!(trace.requests.len() <= LIMITS.rows_max);
    assert!(
        trace.requests.is_sorted_by_key(|request| request.at),
        "requests come in the order of time"
    );
}

/// The first byte says whether the others are a file, or the events of one.
pub(crate) fn flight_record(data: &[u8]) {
    let mut choices = Choices::of(data);
    let is_file = choices.flag();
    let bytes = choices.rest();
    let made = match is_file {
        true => bytes.to_vec(),
        false => file_of(bytes),
    };
    let Ok(reader) = Reader::open(&made[..]) else { return };
    match replay(reader, ReplayOptions::default()) {
        Err(ReplayError::CorePanicked { index, .. }) => panic!("event {index} makes the core panic"),
        Ok(replay) => assert!(replay.equal_events <= replay.events),
        Err(_) => {}
    }
}

/// A file with as many events as these bytes are.
fn file_of(mut bytes: &[u8]) -> Vec<u8> {
    let header = Header {
        version: "0.1.0".to_owned(),
        coordinator: "coordinator-0".to_owned(),
        started_unix_ms: 0,
        config: ClusterConfig::default(),
    };
    let mut file = file_start(&header).expect("a header");
    let mut entries = EntryEncoder::default();
    while let Ok(((now, event), rest)) = postcard::take_from_bytes::<(Time, ClusterEvent)>(bytes) {
        bytes = rest;
        if let ClusterEvent::RequestArrived { request } = &event
            && request.prompt_tokens() > PROMPT_TOKENS_MAX
        {
            continue;
        }
        entries.begin(now, &event);
        // What cannot be encoded is left out.
        let _ = entries.finish(None, &[]);
    }
    file.extend(frame_of(&entries.take()));
    file
}
