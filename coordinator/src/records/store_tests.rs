//! The ring's limits, its pages and its filters.

use super::shape::{PromptShape, Serving};
use super::*;

fn detail(seq: u64, e2e_ms: f64) -> Detail {
    Detail {
        summary: Summary {
            seq,
            id: format!("request-{seq}"),
            trace_id: format!("{seq:032x}"),
            response_id: Some(format!("cmpl-{seq}")),
            received_unix_ms: 0.0,
            endpoint: "chat".into(),
            model: Some("m".to_owned()),
            lane: "interactive".into(),
            is_streaming: true,
            state: RecordState::Ended,
            outcome: Some("ok".into()),
            status: Some(200),
            error: None,
            serving: Serving {
                prompt_tokens: 1,
                output_tokens: 2,
                prefill_node: Some("prefill-0".to_owned()),
                decode_node: Some(format!("decode-{}", seq % 2)),
                attempts: 1,
                transport: Some("grpc".to_owned()),
                kv_bytes: 10,
                ..Serving::default()
            },
            queue_ms: None,
            ttft_ms: Some(1.0),
            tpot_ms: None,
            itl_p50_ms: None,
            itl_p99_ms: None,
            itl_max_ms: None,
            e2e_ms,
            unattributed_ms: None,
            last_token_ms: None,
            last_token_to_end_ms: None,
            stall_count: 0,
            slo: "chat".into(),
            breached: Vec::new(),
            slow_because: None,
        },
        stages: Vec::new(),
        stalls: Vec::new(),
        failed_legs: Vec::new(),
        prompts: Vec::new(),
        clocks: Vec::new(),
        prefixes: Arc::default(),
    }
}

fn listing(limit: usize, before: Option<u64>) -> Listing {
    Listing {
        limit: Some(limit),
        before,
        ..Listing::default()
    }
}

fn store(count: u64, limits: RecordLimits) -> RecordStore {
    let store = RecordStore::new(limits);
    for _ in 0..count {
        let seq = store.next_seq();
        store.ended(detail(seq, ((seq * 7) % 10) as f64));
    }
    store
}

fn seqs(page: &Page) -> Vec<u64> {
    page.records.iter().map(|summary| summary.seq).collect()
}

#[test]
fn the_ring_forgets_the_oldest_by_count_and_by_bytes() {
    let few = RecordLimits {
        records_max: 3,
        ..RecordLimits::default()
    };
    let by_count = store(10, few);
    let page = by_count.list(&listing(100, None));
    assert_eq!((seqs(&page), page.kept, page.forgotten), (vec![10, 9, 8], 3, 7));
    assert!(by_count.find("request-7").is_none());
    let one = detail(1, 0.0).bytes();
    let small = RecordLimits {
        bytes_max: one * 4,
        ..RecordLimits::default()
    };
    let by_bytes = store(100, small);
    let ring = by_bytes.ring();
    assert!(
        ring.bytes <= one * 4 && ring.ended.len() >= 3,
        "{} in {}",
        ring.ended.len(),
        ring.bytes
    );
    assert_eq!(
        ring.bytes,
        ring.ended.iter().map(|detail| detail.bytes()).sum::<usize>()
    );
}

#[test]
fn pages_follow_each_other_without_gap_or_repeat() {
    let store = store(7, RecordLimits::default());
    let (mut before, mut all) = (None, Vec::new());
    loop {
        let page = store.list(&listing(3, before));
        all.extend(seqs(&page));
        before = page.next_before;
        if before.is_none() {
            break;
        }
    }
    assert_eq!(all, [7, 6, 5, 4, 3, 2, 1]);
    let slowest = Listing {
        slowest: true,
        ..listing(2, None)
    };
    assert_eq!(seqs(&store.list(&slowest)), [7, 4], "9 and 8 ms");
}

#[test]
fn all_filters_must_hold() {
    let summary = detail(1, 5.0).summary;
    let admits = |filter: Listing| filter.admits(&summary);
    let text = |text: &str| text.to_owned();
    assert!(admits(Listing::default()));
    assert!(admits(Listing {
        node: text("prefill-0"),
        lane: text("interactive"),
        ..Listing::default()
    }));
    assert!(!admits(Listing {
        node: text("prefill-0"),
        lane: text("batch"),
        ..Listing::default()
    }));
    assert!(!admits(Listing {
        breached: Some(true),
        ..Listing::default()
    }));
    assert!(admits(Listing {
        breached: Some(false),
        running: Some(false),
        ..Listing::default()
    }));
    assert!(!admits(Listing {
        slower_than_ms: Some(5.0),
        ..Listing::default()
    }));
}

#[test]
fn a_request_is_found_by_each_of_its_names() {
    let store = store(3, RecordLimits::default());
    for id in ["request-2", "cmpl-2", &format!("{:032x}", 2), "2"] {
        assert_eq!(store.find(id).map(|detail| detail.summary.seq), Some(2), "{id}");
    }
    assert!(store.find("request-20").is_none());
    let pairs = store.pairs();
    let pair = ("prefill-0".to_owned(), "decode-1".to_owned());
    assert_eq!(
        pairs.get(&pair),
        Some(&PairTotals {
            kv_bytes: 20,
            handoffs: 2
        })
    );
    // A client chooses its request's id. It hides no other request.
    let mut other = detail(9, 1.0);
    other.summary.id = "cmpl-2".to_owned();
    store.ended(other);
    assert_eq!(store.find("cmpl-2").map(|detail| detail.summary.seq), Some(2));
}

#[test]
fn each_prompt_of_a_request_counts_for_its_own_pair() {
    let store = RecordStore::new(RecordLimits::default());
    let mut of_two = detail(1, 1.0);
    let of_node = |node: &str, kv_bytes| PromptShape {
        serving: Serving {
            decode_node: Some(node.to_owned()),
            kv_bytes,
            ..of_two.summary.serving.clone()
        },
        ..PromptShape::default()
    };
    of_two.prompts = vec![of_node("decode-0", 30), of_node("decode-1", 70)];
    of_two.summary.serving.kv_bytes = 100;
    store.ended(of_two);
    let bytes = |decode: &str| store.pairs()[&("prefill-0".to_owned(), decode.to_owned())].kv_bytes;
    assert_eq!((bytes("decode-0"), bytes("decode-1")), (30, 70));
}

#[test]
fn bytes_that_no_node_can_have_moved_end_no_request() {
    let store = RecordStore::new(RecordLimits::default());
    for seq in [2, 4] {
        let mut wrong = detail(seq, 1.0);
        wrong.summary.serving.kv_bytes = u64::MAX;
        store.ended(wrong);
    }
    let pair = ("prefill-0".to_owned(), "decode-0".to_owned());
    let totals = PairTotals {
        kv_bytes: u64::MAX,
        handoffs: 2,
    };
    assert_eq!(store.pairs()[&pair], totals);
}

#[test]
fn pairs_of_names_that_do_not_come_again_are_forgotten() {
    let store = RecordStore::new(RecordLimits::default());
    let pairs_max = PAIRS_MAX as u64;
    for seq in 0..pairs_max + 2 {
        let mut detail = detail(seq, 1.0);
        // The first pair is used all the time.
        let decode = if seq % 2 == 0 { 0 } else { seq };
        detail.summary.serving.decode_node = Some(format!("decode-{decode}"));
        store.ended(detail.clone());
        detail.summary.serving.decode_node = Some(format!("decode-{}", seq + pairs_max));
        store.ended(detail);
    }
    let pairs = store.pairs();
    assert_eq!(pairs.len(), PAIRS_MAX);
    let pair = |decode: u64| ("prefill-0".to_owned(), format!("decode-{decode}"));
    assert_eq!(pairs[&pair(0)].handoffs, pairs_max / 2 + 1);
    assert!(!pairs.contains_key(&pair(1)));
}

#[test]
fn a_follower_hears_of_ends_and_of_what_it_has_missed() {
    let store = store(0, RecordLimits::default());
    let mut events = store.follow();
    for seq in 0..EVENTS_BEHIND_MAX as u64 + 5 {
        store.ended(detail(seq, 1.0));
    }
    assert!(matches!(
        events.try_recv(),
        Err(broadcast::error::TryRecvError::Lagged(5))
    ));
    assert_eq!(events.try_recv().map(|summary| summary.seq), Ok(5));
}

#[test]
fn a_follower_of_the_ends_gets_each_once_and_knows_what_it_has_missed() {
    let few = RecordLimits {
        records_max: 4,
        ..RecordLimits::default()
    };
    let store = store(3, few);
    let page = |from, limit| store.ended_from(&listing(limit, None), from);
    let first = page(0, 2);
    assert_eq!((seqs(&first), first.next_ended_from), (vec![1, 2], Some(2)));
    let rest = page(2, 2);
    assert_eq!((seqs(&rest), rest.next_ended_from), (vec![3], Some(3)));
    assert_eq!(page(3, 2).next_ended_from, Some(3), "nothing new");
    // The record that began later ends first.
    for seq in [6, 5, 4, 7] {
        store.ended(detail(seq, 1.0));
    }
    let later = page(2, 10);
    assert_eq!((seqs(&later), later.forgotten), (vec![6, 5, 4, 7], 3));
    assert_eq!(later.next_ended_from, Some(7), "number 2 was missed");
    assert_eq!(page(99, 10).next_ended_from, Some(7), "a number of an earlier process");
}

#[test]
fn fingerprints_are_on_their_own_page_only_and_count_as_bytes() {
    use prefixes::PrefixShape;
    let prompt = PrefixShape {
        prompt_tokens: 20,
        blocks: vec![7, 8],
        continues: None,
    };
    let with = |blocks: usize| Detail {
        prefixes: Arc::from([PrefixShape {
            blocks: vec![7; blocks],
            ..prompt.clone()
        }]),
        ..detail(1, 1.0)
    };
    assert_eq!(with(1_000).bytes() - with(0).bytes(), 8_000);
    let store = store(0, RecordLimits::default());
    store.ended(with(2));
    let asked = Listing {
        prefixes: true,
        ..listing(10, None)
    };
    let page = serde_json::to_value(store.ended_from(&asked, 0)).expect("JSON");
    assert_eq!(
        page["prefixes"]["requests"]["1"][0]["blocks"],
        serde_json::json!([7, 7])
    );
    for other in [store.ended_from(&listing(10, None), 0), store.list(&asked)] {
        assert!(serde_json::to_value(other).expect("JSON").get("prefixes").is_none());
    }
    let detail = serde_json::to_value(&*store.find("1").expect("kept")).expect("JSON");
    assert!(detail.get("prefixes").is_none());
}

#[test]
fn a_page_of_fingerprints_is_limited() {
    let store = store(0, RecordLimits::default());
    for seq in 1..=5 {
        let blocks = vec![seq; PAGE_BLOCKS_MAX / 2];
        let prompt = prefixes::PrefixShape {
            prompt_tokens: 1,
            blocks,
            continues: None,
        };
        store.ended(Detail {
            prefixes: Arc::from([prompt]),
            ..detail(seq, 1.0)
        });
    }
    let page = store.ended_from(&listing(10, None), 0);
    assert_eq!((page.records.len(), page.next_ended_from), (2, Some(2)));
}
