//! Hostile values: each is refused with an error that names the field. `fuzz` tries arbitrary bytes.

use bytes::Bytes;
use serving_core::ids::{Attempt, BlockId, Generation, NodeEpoch, TransferId};
use serving_core::kv::prefix_log::PREFIX_KEYS_MAX;

use super::ConvertError;
use super::round_trip_tests::sample_request;
use crate::messages::{
    CoordinatorReport, DecodeEvent, KvBlockFrame, KvFrame, KvReply, NodeReport, OpenRequest, PrefillEvent,
    PrefillRequest, StagedBlock, StagedFrame, StagedReply,
};
use crate::v1;

fn prefill() -> v1::PrefillRequest {
    PrefillRequest {
        attempt: Attempt(0),
        request: sample_request(),
        node_epoch: serving_core::ids::NodeEpoch(7),
        permit_tokens: 3,
        coordinator_epoch: NodeEpoch(9),
        ticket: None,
    }
    .into()
}

/// Breaks a good request and returns the field the error names.
fn broken(change: impl FnOnce(&mut v1::GenerateRequest)) -> &'static str {
    let mut wire = prefill();
    change(wire.request.as_mut().unwrap());
    PrefillRequest::try_from(wire).unwrap_err().field()
}

fn broken_sampling(change: impl FnOnce(&mut v1::SamplingParams)) -> &'static str {
    broken(|request| change(request.sampling.as_mut().unwrap()))
}

#[test]
fn each_bad_field_of_a_request_is_named() {
    assert!(PrefillRequest::try_from(prefill()).is_ok());
    assert_eq!(broken(|r| r.request_id = vec![0; 15]), "request.request_id");
    assert_eq!(broken(|r| r.request_id.clear()), "request.request_id");
    assert_eq!(broken(|r| r.prompt.clear()), "request.prompt");
    assert_eq!(broken(|r| r.prompt = vec![1; (1 << 20) + 1]), "request.prompt");
    assert_eq!(broken(|r| r.client_prompt_tokens = 0), "request.client_prompt_tokens");
    assert_eq!(broken(|r| r.client_prompt_tokens = 99), "request.client_prompt_tokens");
    assert_eq!(broken(|r| r.choice_count = 0), "request.choice_count");
    assert_eq!(broken(|r| r.choice_count = 1_000_000), "request.choice_count");
    assert_eq!(broken(|r| r.lane = 0), "request.lane");
    assert_eq!(broken(|r| r.lane = -5), "request.lane");
    assert_eq!(broken(|r| r.sampling = None), "request.sampling");
    assert_eq!(broken(|r| r.stop = None), "request.stop");
    assert_eq!(broken(|r| r.logprobs = Some(u32::MAX)), "request.logprobs");
    assert_eq!(
        broken(|r| r.stop.as_mut().unwrap().end_tokens = vec![0; 10_000]),
        "request.stop.end_tokens"
    );
}

#[test]
fn numbers_that_would_take_a_logit_out_of_range_are_refused() {
    assert_eq!(
        broken_sampling(|s| s.repetition_penalty = 2e-38),
        "request.sampling.repetition_penalty"
    );
    assert_eq!(
        broken_sampling(|s| s.frequency_penalty = f32::MIN),
        "request.sampling.frequency_penalty"
    );
    assert_eq!(
        broken_sampling(|s| s.presence_penalty = f32::MIN),
        "request.sampling.presence_penalty"
    );
}

#[test]
fn each_bad_number_of_the_sampling_is_named() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0] {
        assert_eq!(broken_sampling(|s| s.temperature = bad), "request.sampling.temperature");
        assert_eq!(broken_sampling(|s| s.top_p = bad), "request.sampling.top_p");
        assert_eq!(broken_sampling(|s| s.min_p = bad), "request.sampling.min_p");
        assert_eq!(
            broken_sampling(|s| s.repetition_penalty = bad),
            "request.sampling.repetition_penalty"
        );
    }
    assert_eq!(
        broken_sampling(|s| s.presence_penalty = f32::NAN),
        "request.sampling.presence_penalty"
    );
    assert_eq!(
        broken_sampling(|s| s.frequency_penalty = f32::NAN),
        "request.sampling.frequency_penalty"
    );
    assert_eq!(broken_sampling(|s| s.top_k = Some(0)), "request.sampling.top_k");
    let bias = |token| v1::LogitBias { token, bias: 1.0 };
    assert_eq!(
        broken_sampling(|s| s.logit_bias = vec![bias(2), bias(2)]),
        "request.sampling.logit_bias"
    );
    let nan = v1::LogitBias {
        token: 1,
        bias: f32::NAN,
    };
    assert_eq!(
        broken_sampling(|s| s.logit_bias = vec![nan]),
        "request.sampling.logit_bias"
    );
    assert_eq!(
        broken_sampling(|s| s.logit_bias = (0..5000).map(bias).collect()),
        "request.sampling.logit_bias"
    );
}

#[test]
fn empty_messages_name_what_is_missing() {
    assert_eq!(
        PrefillRequest::try_from(v1::PrefillRequest::default())
            .unwrap_err()
            .field(),
        "request"
    );
    assert_eq!(
        OpenRequest::try_from(v1::OpenRequest::default()).unwrap_err().field(),
        "request"
    );
    assert_eq!(
        DecodeEvent::try_from(v1::DecodeEvent::default()).unwrap_err().field(),
        "decode_event"
    );
    assert_eq!(
        PrefillEvent::try_from(v1::PrefillEvent::default()).unwrap_err().field(),
        "prefill_event"
    );
    assert_eq!(
        NodeReport::try_from(v1::NodeReport::default()).unwrap_err().field(),
        "node_report"
    );
    assert_eq!(
        CoordinatorReport::try_from(v1::CoordinatorReport::default())
            .unwrap_err()
            .field(),
        "coordinator_report"
    );
    assert_eq!(
        KvFrame::try_from(v1::KvFrame::default()).unwrap_err().field(),
        "kv_frame"
    );
    assert_eq!(
        KvReply::try_from(v1::KvReply::default()).unwrap_err().field(),
        "kv_reply"
    );
}

#[test]
fn block_counts_whose_sum_overflows_are_refused() {
    let status = v1::NodeStatus {
        state: v1::NodeState::Ready.into(),
        kv_blocks: Some(v1::KvBlockCounts {
            free: u32::MAX,
            active: 1,
            ..Default::default()
        }),
        ..Default::default()
    };
    let report = v1::NodeReport {
        report: Some(v1::node_report::Report::Status(status)),
    };
    assert_eq!(NodeReport::try_from(report).unwrap_err().field(), "status.kv_blocks");
}

#[test]
fn a_prefix_report_of_too_many_keys_or_that_contradicts_itself_is_refused() {
    let refused = |report: v1::PrefixReport| {
        let report = Some(v1::node_report::Report::Prefixes(report));
        NodeReport::try_from(v1::NodeReport { report }).unwrap_err().field()
    };
    let flood = v1::PrefixReport {
        listed: vec![1; PREFIX_KEYS_MAX + 1],
        ..Default::default()
    };
    assert_eq!(refused(flood), "prefixes.listed");
    let both = v1::PrefixReport {
        whole: true,
        gone: vec![1],
        ..Default::default()
    };
    assert_eq!(refused(both), "prefixes.gone");
}

#[test]
fn a_lease_of_zero_is_refused() {
    let renewed = v1::coordinator_report::Report::Renewed(v1::LeaseRenewed { lease_ms: 0 });
    let report = v1::CoordinatorReport { report: Some(renewed) };
    assert_eq!(
        CoordinatorReport::try_from(report).unwrap_err().field(),
        "renewed.lease_ms"
    );
}

#[test]
fn an_empty_layer_range_is_refused() {
    let block = v1::KvBlock {
        transfer_id: vec![0; 16],
        layer_begin: 3,
        layer_end: 3,
        ..Default::default()
    };
    let frame = v1::KvFrame {
        frame: Some(v1::kv_frame::Frame::Block(block)),
    };
    assert_eq!(KvFrame::try_from(frame).unwrap_err().field(), "block.layer_end");
}

#[test]
fn names_with_line_breaks_do_not_get_into_logs_or_labels() {
    let abort = v1::Abort {
        transfer_id: TransferId(1).0.to_be_bytes().to_vec(),
        reason: "a\nb".to_owned(),
    };
    let frame = v1::KvFrame {
        frame: Some(v1::kv_frame::Frame::Abort(abort)),
    };
    assert!(matches!(
        KvFrame::try_from(frame),
        Err(ConvertError::BadText {
            field: "abort.reason",
            ..
        })
    ));
}

#[test]
fn an_answer_to_a_hello_has_few_small_offers_and_a_known_refusal() {
    let node = v1::NodeRef {
        name: "decode-0".to_owned(),
        epoch: 1,
    };
    let answer = |accepted, reason: &str, offers: Vec<v1::TransportOffer>| {
        let reply = v1::kv_reply::Reply::Hello(v1::HelloReply {
            node: Some(node.clone()),
            accepted,
            reason: reason.to_owned(),
            detail: String::new(),
            offers,
        });
        KvReply::try_from(v1::KvReply { reply: Some(reply) }).map_err(|error| error.field())
    };
    let offer = |bytes: usize| v1::TransportOffer {
        transport: "shm".to_owned(),
        offer: vec![0; bytes].into(),
    };
    assert!(answer(true, "", vec![offer(4096)]).is_ok());
    assert_eq!(answer(true, "", vec![offer(4097)]), Err("hello.offers.offer"));
    assert_eq!(answer(true, "", vec![offer(0); 2000]), Err("hello.offers"));
    let nameless = v1::TransportOffer::default();
    assert_eq!(answer(true, "", vec![nameless]), Err("hello.offers.transport"));
    assert!(answer(false, "protocol_version", Vec::new()).is_ok());
    assert_eq!(answer(false, "", Vec::new()), Err("hello.reason"));
    assert_eq!(answer(false, "no such reason", Vec::new()), Err("hello.reason"));
}

#[test]
fn facts_of_compatibility_are_optional_and_checked() {
    let hello = |facts| v1::Hello {
        from: Some(v1::NodeRef {
            name: "p".into(),
            epoch: 1,
        }),
        to: Some(v1::NodeRef {
            name: "d".into(),
            epoch: 2,
        }),
        compatibility_hash: vec![7; 32],
        compatibility_facts: facts,
        ..Default::default()
    };
    let read = |facts| {
        let frame = v1::kv_frame::Frame::Hello(hello(facts));
        KvFrame::try_from(v1::KvFrame { frame: Some(frame) })
    };
    let Ok(KvFrame::Hello(earlier)) = read(None) else {
        panic!("an earlier version sends no facts");
    };
    assert_eq!(earlier.compatibility.facts, None);
    let good = || v1::CompatibilityFacts {
        weights_sha256: vec![1; 32],
        tokenizer_sha256: vec![2; 32],
        numerics_id: "cpu/1".into(),
        kv_dtype: "f16".into(),
        rope_base: 1e4,
        ..Default::default()
    };
    assert!(read(Some(good())).is_ok());
    type Change = fn(&mut v1::CompatibilityFacts);
    let bad: [(&str, Change); 5] = [
        ("compatibility_facts.weights_sha256", |f| f.weights_sha256.truncate(31)),
        ("compatibility_facts.tokenizer_sha256", |f| f.tokenizer_sha256.clear()),
        ("compatibility_facts.numerics_id", |f| f.numerics_id = "a\nb".into()),
        ("compatibility_facts.kv_dtype", |f| f.kv_dtype = "x".repeat(256)),
        ("compatibility_facts.rope_base", |f| f.rope_base = f32::NAN),
    ];
    for (field, change) in bad {
        let mut facts = good();
        change(&mut facts);
        assert_eq!(read(Some(facts)).unwrap_err().field(), field);
    }
}

#[test]
fn staged_bytes_are_in_a_slot_and_nowhere_else() {
    let header = KvBlockFrame {
        transfer: TransferId(1),
        sequence_no: 0,
        ticket_index: 0,
        block: BlockId(2),
        generation: Generation(3),
        layer_begin: 0,
        layer_end: 1,
        checksum: 4,
        data: Bytes::new(),
    };
    let good = v1::StagedFrame::from(StagedFrame::Block(StagedBlock {
        header: header.clone(),
        slot: 5,
        data_bytes: 6,
    }));
    assert!(StagedFrame::try_from(good.clone()).is_ok());
    let field = |wire: v1::StagedFrame| StagedFrame::try_from(wire).unwrap_err().field();
    let no_slot = v1::StagedFrame {
        data: None,
        ..good.clone()
    };
    assert_eq!(field(no_slot), "staged.data");
    let inline = KvFrame::Block(KvBlockFrame {
        data: Bytes::from_static(b"x"),
        ..header
    });
    let both = v1::StagedFrame {
        frame: Some(inline.into()),
        ..good.clone()
    };
    assert_eq!(field(both), "staged.data");
    let begin = KvFrame::Begin {
        transfer: TransferId(1),
    };
    let slot_of_nothing = v1::StagedFrame {
        frame: Some(begin.clone().into()),
        ..good
    };
    assert_eq!(field(slot_of_nothing), "staged.data");
    let goodbye_and_more = v1::StagedFrame {
        frame: Some(begin.into()),
        data: None,
        goodbye: true,
    };
    assert_eq!(field(goodbye_and_more), "staged.goodbye");
    assert_eq!(field(v1::StagedFrame::default()), "staged.frame");
    assert_eq!(
        StagedReply::try_from(v1::StagedReply::default()).unwrap_err().field(),
        "staged_reply"
    );
}
