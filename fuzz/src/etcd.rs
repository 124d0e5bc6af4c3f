//! Records in etcd, which anybody who can write there may have put there. The input is a name, a line end and the record.

use etcd_membership::{BadRecord, CoordinatorEntry, Entry, NodeEntry, RECORD_BYTES_MAX, decode_at, epoch_of};

pub(crate) fn check(data: &[u8]) {
    let end = data.iter().position(|byte| *byte == b'\n').unwrap_or(data.len());
    let (name, record) = data.split_at(end);
    let record = record.get(1..).unwrap_or_default();
    round_trip::<NodeEntry>(name, record);
    round_trip::<CoordinatorEntry>(name, record);
}

fn round_trip<T: Entry>(name: &[u8], record: &[u8]) {
    match decode_at::<T>(name, record) {
        Ok(entry) => {
            assert!(record.len() <= RECORD_BYTES_MAX);
            assert_eq!(epoch_of(record), Some(entry.id().epoch));
            assert_eq!(entry.id().name.as_str().as_bytes(), name);
            let again = entry.encode().expect("what was read can be written");
            assert_eq!(decode_at::<T>(name, &again), Ok(entry));
        }
        // It goes to a log, whose lines must not grow with what somebody wrote.
        Err(error) => assert!(is_short(&error), "{error}"),
    }
}

fn is_short(error: &BadRecord) -> bool {
    error.to_string().len() < 1_000
}
