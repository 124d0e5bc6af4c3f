//! Tests of records: a replay gives every action again, no token is in a record, and no file makes a reader panic.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serving_core::cluster::ClusterEvent;
use serving_core::ids::QueueOwner;
use serving_core::node::AssignedRole;
use serving_core::request::{Lane, QueueShare, Request};
use serving_core::routing::RoutingPolicy;
use serving_core::time::Time;

use super::*;
use world::{TOKEN_BASE, World};

mod world;

const FULL: u64 = 12_000;

fn replayed(record: &[u8]) -> Result<Replay, ReplayError> {
    replay(Reader::open(record)?, ReplayOptions::default())
}

#[test]
fn a_record_of_ten_thousand_events_with_faults_replays_with_every_action_equal() {
    for (seed, routing) in RoutingPolicy::ALL.iter().enumerate() {
        // One whole run; of the other policies enough to be used.
        let events = if seed == 0 { FULL } else { FULL / 6 };
        let record = World::new(seed as u64, *routing).run(events);
        let replay = replayed(&record).expect("a whole record");
        assert!(replay.is_equal(), "{routing:?}: {:#?}", replay.first_difference);
        assert!(replay.events >= events && replay.actions > events / 2, "{replay:?}");
        assert!(replay.faults > events / 50, "{} faults", replay.faults);
        assert!(
            replay.events_by_kind["attempt ended"] > events / 200,
            "{:?}",
            replay.events_by_kind
        );
        assert_eq!(replay.ending, Some(Ending::Cut));
    }
}

#[test]
fn a_silence_that_costs_nodes_their_lease_is_a_fault() {
    let record = World::new(9, RoutingPolicy::LeastLoaded).silence().run(0);
    let replay = replayed(&record).expect("a whole record");
    assert!(replay.is_equal());
    assert_eq!(replay.faults, 1);
}

#[test]
fn what_a_core_would_decide_otherwise_is_found_where_it_happens() {
    let record = World::new(1, RoutingPolicy::LeastLoaded).run(2_000);
    let mut reader = Reader::open(record.as_slice()).expect("a record");
    let mut header = reader.header().clone();
    header.config.routing = RoutingPolicy::RoundRobin;
    let mut changed = file_start(&header).expect("a header");
    let start = file_start(reader.header()).expect("a header").len();
    changed.extend(&record[start..]);
    let replay = replayed(&changed).expect("it can be read");
    let difference = replay.first_difference.clone().expect("another policy");
    assert!(!replay.is_equal() && replay.equal_events > 0);
    assert!(!difference.before.is_empty());
    assert_ne!(difference.at.actions, difference.replayed_actions);
    // Everything before it is equal.
    let mut equal = 0;
    while let Ok(Some(_)) = reader.next_entry() {
        equal += 1;
    }
    assert!(difference.at.index < equal);
}

#[test]
fn a_replay_stops_where_it_is_told_and_shows_the_last_events() {
    let record = World::new(2, RoutingPolicy::PrefixAware).run(2_000);
    let until = Duration::from_secs(5);
    let options = ReplayOptions {
        until: Some(until),
        shown_max: 7,
    };
    let reader = Reader::open(record.as_slice()).expect("a record");
    let replay = replay(reader, options).expect("a whole record");
    assert!(replay.is_equal() && replay.span <= until && replay.ending.is_none());
    assert_eq!(replay.shown.len(), 7);
    assert_eq!(replay.shown[6].index, replay.events - 1);
}

#[test]
fn no_token_is_in_a_record() {
    let record = World::new(3, RoutingPolicy::PrefixAware).run(3_000);
    let high = [(TOKEN_BASE >> 24) as u8, (TOKEN_BASE >> 16) as u8];
    // As four bytes, and as a varint: 32 bits, lowest first, seven in each byte.
    let is_fixed = |bytes: &[u8]| bytes[3] == high[0] && (bytes[2] & 0xfc) == high[1];
    let is_varint = |bytes: &[u8]| {
        let is_long = bytes[..4].iter().all(|byte| byte & 0x80 != 0) && bytes[4] < 16;
        let value = (0..5).fold(0_u64, |value, i| value | (u64::from(bytes[i] & 0x7f) << (7 * i)));
        is_long && (u64::from(TOKEN_BASE)..u64::from(TOKEN_BASE) + 0x4_0000).contains(&value)
    };
    // Keys and ids are random, so a few places look like one token. A prompt would be many in a row.
    let runs_of = |is_token: &dyn Fn(&[u8]) -> bool, width: usize| {
        let starts = 0..record.len().saturating_sub(3 * width + 5);
        starts
            .filter(|start| (0..3).all(|i| is_token(&record[start + i * width..])))
            .count()
    };
    assert_eq!(runs_of(&is_fixed, 4), 0);
    assert_eq!(runs_of(&is_varint, 5), 0);
    // The same search finds tokens where there are some.
    let tokens: Vec<u8> = (0..9).flat_map(|i| (TOKEN_BASE + i).to_le_bytes()).collect();
    assert!(tokens.windows(4).any(is_fixed));
    let mut varints = Vec::new();
    for token in TOKEN_BASE..TOKEN_BASE + 9 {
        write::append(&token, &mut varints).expect("a number");
    }
    assert!(varints.windows(5).any(is_varint));
}

#[test]
fn a_record_is_read_up_to_its_end_mark_and_says_why_it_ends() {
    let mut record = World::new(4, RoutingPolicy::LeastLoaded).run(300);
    let mark = EndMark {
        reason: EndReason::QueueFull,
        lost_events: 17,
    };
    record.extend(end_mark(mark));
    assert_eq!(replayed(&record).expect("whole").ending, Some(Ending::Marked(mark)));
    record.push(0);
    assert!(matches!(
        replayed(&record),
        Err(ReplayError::Record(RecordError::Damaged { .. }))
    ));
}

#[test]
fn foreign_files_other_schemas_and_cut_files_are_told_apart() {
    let record = World::new(5, RoutingPolicy::LeastLoaded).run(300);
    let error = |bytes: &[u8]| Reader::open(bytes).expect_err("no record");
    assert!(matches!(error(b""), RecordError::NotARecord));
    assert!(matches!(error(b"GIF89a and more"), RecordError::NotARecord));
    assert!(matches!(error(&record[..30]), RecordError::NoHeader));
    let mut other = record.clone();
    other[8] = 200;
    assert!(matches!(error(&other), RecordError::UnknownSchema { found: 200 }));
    let mut long = record.clone();
    long[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(matches!(error(&long), RecordError::FrameTooLong { at_byte: 12, .. }));
    // A coordinator that was killed leaves half a frame: what is before it counts.
    let cut = replayed(&record[..record.len() - 7]).expect("read up to the cut");
    assert_eq!((cut.ending, cut.is_equal()), (Some(Ending::Cut), true));
}

#[test]
fn the_traffic_of_a_record_has_its_arrivals_lengths_prefixes_and_nodes() {
    let record = World::new(8, RoutingPolicy::PrefixAware).run(2_000);
    let replay = replayed(&record).expect("whole");
    let arrivals = replay.events_by_kind["request arrived"];
    let traffic = traffic(Reader::open(record.as_slice()).expect("a record")).expect("traffic");
    let requests = &traffic.trace.requests;
    assert_eq!(requests.len() as u64, arrivals);
    assert!(requests.is_sorted_by_key(|request| request.at) && requests[0].at == Duration::ZERO);
    assert_eq!(traffic.node_count(AssignedRole::Decode), 3);
    assert_eq!(traffic.node_count(AssignedRole::Prefill), 2);
    assert!(
        requests.iter().any(|request| request.output_tokens == 3),
        "the note's length"
    );
    let starts: Vec<u64> = requests
        .iter()
        .filter_map(|r| r.prefix_blocks.first().copied())
        .collect();
    let mut different = starts.clone();
    different.sort_unstable();
    different.dedup();
    assert!(different.len() < starts.len(), "prompts share their first blocks");
    for request in requests.iter().filter(|request| !request.prefix_blocks.is_empty()) {
        assert_eq!(request.prefix_blocks.len(), request.prompt_tokens.div_ceil(16) as usize);
    }
    assert!(!traffic.ttft_ms.is_empty() && traffic.faults > 0);
    assert_eq!(traffic.faults, replay.faults);
}

#[test]
fn a_record_without_requests_or_nodes_has_no_traffic() {
    let start = file_start(&world::header()).expect("a header");
    let error = traffic(Reader::open(start.as_slice()).expect("a record")).expect_err("no traffic");
    assert!(matches!(error, TrafficError::NoRequests));
}

/// Damage that a checksum finds, and damage by somebody who makes the checksum fit.
#[test]
fn no_damage_makes_a_reader_panic_or_goes_unnoticed() {
    let record = World::new(6, RoutingPolicy::PrefixAware).run(400);
    let mut rng = StdRng::seed_from_u64(1);
    let header_end = 12 + FRAME_HEAD_BYTES + frame_body_bytes(&record, 12);
    for round in 0..80 {
        let mut damaged = record.clone();
        let at = rng.random_range(0..damaged.len());
        damaged[at] ^= 1 << rng.random_range(0..8);
        let outcome = replayed(&damaged);
        // A length that is now beyond the end reads as a cut.
        let is_seen = match &outcome {
            Err(_) => true,
            Ok(replay) => replay.ending == Some(Ending::Cut) && replay.events < 400,
        };
        assert!(is_seen, "round {round}: byte {at} was changed, and {outcome:?}");
    }
    for _ in 0..300 {
        let mut forged = record.clone();
        let body = header_end + FRAME_HEAD_BYTES..header_end + FRAME_HEAD_BYTES + frame_body_bytes(&record, header_end);
        for _ in 0..rng.random_range(1..4) {
            forged[rng.random_range(body.clone())] = rng.random();
        }
        let sum = checksum(&forged[body]).to_le_bytes();
        forged[header_end + 4..header_end + 8].copy_from_slice(&sum);
        // Whatever comes of it, it is a value.
        let _ = replayed(&forged);
    }
}

fn frame_body_bytes(record: &[u8], at: usize) -> usize {
    u32::from_le_bytes(record[at..at + 4].try_into().expect("four bytes")) as usize
}

#[test]
fn an_owner_and_a_priority_are_read_as_they_were_written() {
    let arrived = world::one_of_each_event().into_iter().find_map(|event| match event {
        ClusterEvent::RequestArrived { request } => Some(request),
        _ => None,
    });
    let mut request = (*arrived.expect("an arrival")).clone();
    let share = QueueShare {
        owner: QueueOwner(7),
        weight: NonZeroU32::MIN,
    };
    for share in [None, Some(share)] {
        (request.lane, request.priority, request.share) = (Lane::Batch, -3, share);
        let read = read_again(Arc::new(request.clone()));
        assert_eq!((read.lane, read.priority, read.share), (Lane::Batch, -3, share));
    }
}

fn read_again(request: Arc<Request>) -> Arc<Request> {
    let mut encoder = EntryEncoder::default();
    encoder.begin(Time::from_millis(1), &ClusterEvent::RequestArrived { request });
    encoder.finish(None, &[]).expect("it can be encoded");
    let mut record = file_start(&world::header()).expect("a header");
    record.extend(frame_of(&encoder.take()));
    let mut reader = Reader::open(record.as_slice()).expect("a record");
    let Some(Entry::Event(recorded)) = reader.next_entry().expect("whole") else {
        panic!("no event");
    };
    let ClusterEvent::RequestArrived { request } = &recorded.event else {
        panic!("{:?}", recorded.event);
    };
    request.clone()
}

/// Another number here means that older records are read wrongly: raise [`SCHEMA`].
#[test]
fn the_schema_has_not_changed() {
    let mut bytes = file_start(&world::header()).expect("a header");
    let mut encoder = EntryEncoder::default();
    for event in world::one_of_each_event() {
        encoder.begin(Time::from_millis(1), &event);
        let actions = world::one_of_each_action();
        encoder.finish(None, &actions).expect("it can be encoded");
    }
    bytes.extend(frame_of(&encoder.take()));
    assert_eq!((SCHEMA, bytes.len(), checksum(&bytes)), (1, 9029, 3291324632));
}
