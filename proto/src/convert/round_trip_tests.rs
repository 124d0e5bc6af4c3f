//! Every message survives core -> wire bytes -> core unchanged.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use prost::Message;
use serving_core::compatibility::{Compatibility, CompatibilityFacts, CompatibilityHash};
use serving_core::ids::*;
use serving_core::kv::prefix_log::{PrefixKey, PrefixReport};
use serving_core::node::*;
use serving_core::request::*;
use serving_core::stage::{Stage, StageTimings};
use serving_core::time::Time;

use crate::messages::*;
use crate::v1;

pub(super) fn sample_request() -> Request {
    Request {
        id: RequestId(0x0123_4567_89ab_cdef),
        prompt: Arc::from([TokenId(1), TokenId(70_000), TokenId(2)]),
        client_prompt_tokens: 2,
        constraint: Default::default(),
        sampling: SamplingParams {
            logit_bias: vec![(TokenId(1), -1.5), (TokenId(9), 2.0)],
            ..SamplingParams::greedy()
        },
        stop: StopConditions {
            max_tokens: 5,
            min_tokens: 1,
            end_tokens: vec![TokenId(2)],
            stop_token_ids: vec![],
        },
        choice_count: 1,
        seed: 42,
        logprobs: Some(0),
        prompt_logprobs: None,
        prefix_salt: Some(PrefixSalt(0)),
        cache_tenant: Some(CacheTenant(0)),
        report_kv_hashes: true,
        share: None,
        priority: 0,
        lane: Lane::Interactive,
        time_limit: Duration::from_secs(30),
    }
}

fn tokens() -> impl Strategy<Value = Vec<TokenId>> {
    prop::collection::vec(any::<u32>().prop_map(TokenId), 0..6)
}

fn sampling() -> impl Strategy<Value = SamplingParams> {
    let bias = prop::collection::btree_map(any::<u32>(), -100f32..100.0, 0..5);
    let penalties = (-2f32..2.0, -2f32..2.0, 0.1f32..2.0);
    (0f32..2.0, option::of(1u32..), 0f32..=1.0, 0f32..=1.0, penalties, bias).prop_map(
        |(temperature, top_k, top_p, min_p, penalties, bias)| SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            presence_penalty: penalties.0,
            frequency_penalty: penalties.1,
            repetition_penalty: penalties.2,
            logit_bias: bias.into_iter().map(|(token, bias)| (TokenId(token), bias)).collect(),
        },
    )
}

prop_compose! {
    fn request()(
        id in any::<u128>(), prompt in prop::collection::vec(any::<u32>(), 1..40), client in any::<prop::sample::Index>(),
        sampling in sampling(), limits in any::<(u32, u32)>(), ends in (tokens(), tokens()),
        choice_count in 1u32..=128, seed in any::<u64>(), logprobs in (option::of(0u32..=256), option::of(0u32..=256)), scope in any::<(Option<u64>, Option<u64>)>(),
        constraint in constraint(), report_kv_hashes in any::<bool>(), lane in select(vec![Lane::Interactive, Lane::Batch]), nanos in any::<u64>(),
    ) -> Request {
        Request {
            id: RequestId(id),
            client_prompt_tokens: u32::try_from(client.index(prompt.len())).unwrap() + 1,
            constraint: Arc::new(constraint),
            prompt: prompt.into_iter().map(TokenId).collect(),
            sampling,
            stop: StopConditions { max_tokens: limits.0, min_tokens: limits.1, end_tokens: ends.0, stop_token_ids: ends.1 },
            choice_count,
            seed,
            logprobs: logprobs.0,
            prompt_logprobs: logprobs.1,
            prefix_salt: scope.0.map(PrefixSalt),
            cache_tenant: scope.1.map(CacheTenant),
            report_kv_hashes,
            share: None,
            priority: 0,
            lane,
            time_limit: Duration::from_nanos(nanos),
        }
    }
}

fn constraint() -> impl Strategy<Value = OutputConstraint> {
    let text = || any::<String>().prop_map(Arc::<str>::from);
    let grammar = prop_oneof![
        text().prop_map(OutputGrammar::JsonSchema),
        text().prop_map(OutputGrammar::Regex),
        text().prop_map(OutputGrammar::Lark),
    ];
    let word = prop::collection::vec(any::<u32>().prop_map(TokenId), 1..4);
    (option::of(grammar), tokens(), prop::collection::vec(word, 0..3)).prop_map(
        |(grammar, allowed_tokens, bad_words)| OutputConstraint {
            grammar,
            allowed_tokens,
            bad_words,
        },
    )
}

fn label() -> impl Strategy<Value = String> {
    "[a-z][a-z0-9_.:-]{0,30}"
}

fn node() -> impl Strategy<Value = NodeId> {
    (label(), any::<u64>()).prop_map(|(name, epoch)| NodeId {
        name: NodeName::new(&name),
        epoch: NodeEpoch(epoch),
    })
}

fn compatibility() -> impl Strategy<Value = Compatibility> {
    let facts = (
        any::<[[u8; 32]; 2]>(),
        label(),
        label(),
        any::<[u32; 8]>(),
        -1e6f32..1e6,
    );
    let facts = facts.prop_map(|(sums, numerics_id, kv_dtype, numbers, rope_base)| CompatibilityFacts {
        weights_sha256: sums[0],
        tokenizer_sha256: sums[1],
        numerics_id,
        kv_dtype,
        block_tokens: numbers[0],
        layer_count: numbers[1],
        kv_head_count: numbers[2],
        head_dim: numbers[3],
        vocab_size: numbers[4],
        context_length: numbers[5],
        rope_base,
        rank_count: numbers[6],
        protocol_version: numbers[7],
    });
    (any::<[u8; 32]>(), option::of(facts)).prop_map(|(hash, facts)| Compatibility {
        hash: CompatibilityHash(hash),
        facts: facts.map(Box::new),
    })
}

prop_compose! {
    fn ticket()(
        transfer in any::<u128>(), decode_node in node(), decode_address in label(),
        blocks in prop::collection::vec(any::<(u32, u32)>(), 0..20), prefix_blocks in any::<u32>(),
        total_bytes in any::<u64>(), nanos in any::<u64>(),
    ) -> Ticket {
        Ticket {
            transfer: TransferId(transfer), decode_node, decode_address,
            blocks: blocks.into_iter().map(|(b, g)| (BlockId(b), Generation(g))).collect(),
            prefix_blocks, total_bytes, expires_in: Duration::from_nanos(nanos),
        }
    }
}

fn logprobs() -> impl Strategy<Value = TokenLogprobs> {
    let top = prop::collection::vec((any::<u32>().prop_map(TokenId), -50f32..=0.0), 0..5);
    (-50f32..=0.0, top).prop_map(|(logprob, top)| TokenLogprobs { logprob, top })
}

fn finish() -> impl Strategy<Value = FinishReason> {
    prop_oneof![
        Just(FinishReason::EndToken),
        Just(FinishReason::Length),
        any::<u32>().prop_map(|token| FinishReason::StopToken(TokenId(token))),
    ]
}

fn token_event() -> impl Strategy<Value = TokenEvent> {
    (any::<(u32, u32, u32)>(), option::of(logprobs()), option::of(finish())).prop_map(|(ids, logprobs, finish)| {
        TokenEvent {
            choice: ChoiceIndex(ids.0),
            index: OutputIndex(ids.1),
            token: TokenId(ids.2),
            logprobs,
            finish,
        }
    })
}

fn token_events() -> impl Strategy<Value = Vec<TokenEvent>> {
    prop::collection::vec(token_event(), 0..5)
}

fn timings() -> impl Strategy<Value = StageTimings> {
    let is_own = |stage: &Stage| !matches!(stage, Stage::StepWait | Stage::PrefillQueue);
    let own = Stage::ALL.iter().copied().filter(is_own).collect::<Vec<_>>();
    let others = prop::collection::vec((select(own), any::<u64>().prop_map(Duration::from_nanos)), 0..20);
    // The wait for a step travels as a part of the queue, so it comes with one.
    let queue = prop::option::of((prop::option::of(any::<u32>()), any::<u32>()));
    (others, queue).prop_map(|(mut stages, queue)| {
        let time = |ns: u32| Duration::from_nanos(ns.into());
        if let Some((step_wait, queue)) = queue {
            stages.extend(step_wait.map(|ns| (Stage::StepWait, time(ns))));
            stages.push((Stage::PrefillQueue, time(queue)));
        }
        StageTimings(stages)
    })
}

fn prompt_logprobs() -> impl Strategy<Value = PromptLogprobs> {
    (any::<u32>(), prop::collection::vec(logprobs(), 0..4))
        .prop_map(|(first_position, tokens)| PromptLogprobs { first_position, tokens })
}

fn failed() -> impl Strategy<Value = Failed> {
    let faults = vec![
        NodeFault::Engine,
        NodeFault::Transfer,
        NodeFault::Deadline,
        NodeFault::Peer,
        NodeFault::Internal,
        NodeFault::Draining,
        NodeFault::RuledOut,
    ];
    (select(faults), label(), "[ -~]{0,100}").prop_map(|(fault, reason, detail)| Failed { fault, reason, detail })
}

fn refused() -> impl Strategy<Value = Refused> {
    use RefuseReason::*;
    let reasons = vec![NoCapacity, StaleEpoch, Draining, Duplicate, Invalid, Incompatible];
    (select(reasons), "[ -~]{0,100}").prop_map(|(reason, detail)| Refused { reason, detail })
}

fn hashes() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(any::<u64>(), 0..5)
}

fn open_request() -> impl Strategy<Value = OpenRequest> {
    let locals = vec![
        LocalPrefillReason::Short,
        LocalPrefillReason::Cached,
        LocalPrefillReason::NoPrefillNode,
        LocalPrefillReason::TransferFailed,
        LocalPrefillReason::CoLocated,
    ];
    let way = prop_oneof![select(locals).prop_map(Ok), node().prop_map(Err)];
    (request(), any::<(u32, u64, u32)>(), way).prop_map(|(request, numbers, way)| OpenRequest {
        attempt: Attempt(numbers.0),
        request,
        node_epoch: NodeEpoch(numbers.1),
        permit_blocks: numbers.2,
        coordinator_epoch: NodeEpoch(numbers.1 / 3),
        local_prefill: way.clone().ok(),
        prefill_node: way.err(),
    })
}

fn prefill_request() -> impl Strategy<Value = PrefillRequest> {
    (request(), any::<(u32, u64, u32)>(), option::of(ticket())).prop_map(|(request, numbers, ticket)| PrefillRequest {
        attempt: Attempt(numbers.0),
        request,
        node_epoch: NodeEpoch(numbers.1),
        permit_tokens: numbers.2,
        coordinator_epoch: NodeEpoch(numbers.1 / 3),
        ticket,
    })
}

fn token_batch() -> impl Strategy<Value = TokenBatch> {
    let step = any::<(u64, u32, u32)>().prop_map(|(took, prompt_tokens, preemptions)| StepNote {
        took: Duration::from_nanos(took),
        prompt_tokens,
        preemptions,
    });
    (token_events(), any::<u64>(), option::of(step)).prop_map(|(tokens, at, step)| TokenBatch {
        tokens,
        sampled_at: Time(at),
        step,
    })
}

fn decode_event() -> impl Strategy<Value = DecodeEvent> {
    let transport = prop_oneof![Just(String::new()), label()];
    let finished = (timings(), any::<(u32, u32, u64, u64, u64)>(), hashes(), transport).prop_map(
        |(timings, numbers, kv_hashes, transport)| {
            DecodeEvent::Finished(DecodeFinished {
                timings,
                cached_tokens: numbers.0,
                preemptions: numbers.1,
                drafted_tokens: numbers.3,
                accepted_tokens: numbers.4,
                kv_hashes,
                kv_bytes: numbers.2,
                transport,
            })
        },
    );
    let opened = (option::of(ticket()), any::<(u32, u32, u64)>()).prop_map(|(ticket, numbers)| {
        DecodeEvent::Opened(Opened {
            ticket,
            prefix_blocks: numbers.0,
            cached_tokens: numbers.1,
            at: Time(numbers.2),
        })
    });
    prop_oneof![
        opened,
        token_batch().prop_map(DecodeEvent::Tokens),
        prompt_logprobs().prop_map(DecodeEvent::PromptLogprobs),
        (timings(), any::<Option<u32>>())
            .prop_map(|(timings, cached_tokens)| DecodeEvent::Committed { timings, cached_tokens }),
        finished,
        failed().prop_map(DecodeEvent::Failed),
        refused().prop_map(DecodeEvent::Refused),
    ]
}

fn prefill_event() -> impl Strategy<Value = PrefillEvent> {
    let outcomes = vec![PrefillOutcome::HandedOver, PrefillOutcome::EndedAtFirstToken];
    let transport = prop_oneof![Just(String::new()), label()];
    let finished = (
        select(outcomes),
        timings(),
        any::<(u64, u64, u32)>(),
        transport,
        hashes(),
    )
        .prop_map(|(outcome, timings, numbers, transport, kv_hashes)| {
            PrefillEvent::Finished(PrefillFinished {
                outcome,
                timings,
                kv_bytes: numbers.0,
                transfer: Duration::from_nanos(numbers.1),
                transport,
                cached_tokens: numbers.2,
                kv_hashes,
            })
        });
    prop_oneof![
        any::<(u32, u64)>().prop_map(|(cached_tokens, at)| PrefillEvent::Accepted {
            cached_tokens,
            at: Time(at)
        }),
        token_batch().prop_map(PrefillEvent::Tokens),
        prompt_logprobs().prop_map(PrefillEvent::PromptLogprobs),
        (timings(), any::<u64>()).prop_map(|(timings, at)| PrefillEvent::FirstToken {
            timings,
            sampled_at: Time(at)
        }),
        finished,
        failed().prop_map(PrefillEvent::Failed),
        refused().prop_map(PrefillEvent::Refused),
    ]
}

fn assigned_role() -> impl Strategy<Value = AssignedRole> {
    select(AssignedRole::ALL.to_vec())
}

fn state() -> impl Strategy<Value = NodeState> {
    select(vec![NodeState::Joining, NodeState::Ready, NodeState::Draining])
}

prop_compose! {
    fn record()(
        id in node(), role in select(vec![NodeRole::Prefill, NodeRole::Decode]), co_located in any::<bool>(), address in label(),
        compatibility in compatibility(), transports in prop::collection::vec(label(), 0..4), texts in (label(), label()),
        numbers in any::<(u32, u32, u32, u32, u64)>(), block_tokens in 1u32.., state in state(),
        roles in prop::collection::vec(assigned_role(), 0..3),
    ) -> NodeRecord {
        NodeRecord {
            id, role, is_co_located: co_located && role == NodeRole::Decode, kv_address: format!("{address}:kv"), address, compatibility, transports,
            version: texts.0, model_name: texts.1, state, roles,
            capacity: NodeCapacity {
                kv_blocks: numbers.0, block_tokens, max_sequences: numbers.1, max_batch_tokens: numbers.2,
                max_model_tokens: numbers.3, block_bytes: numbers.4,
            },
        }
    }
}

prop_compose! {
    fn status()(
        state in state(), permits in any::<(u64, u64)>(), blocks in prop::array::uniform6(0u32..=u32::MAX / 6),
        counts in any::<(u32, u32, u32)>(), totals in any::<(u64, u64, u64, u64)>(),
        pairs in prop::collection::vec((node(), option::of(label()), option::of(label())), 0..4),
    ) -> NodeStatus {
        NodeStatus {
            state, permits_granted_total: permits.0, permits_received_total: permits.1,
            permits_recalled_total: permits.0 / 2, permits_received_by: Vec::new(), coordinators: 3,
            kv_blocks: KvBlockCounts {
                free: blocks[0], active: blocks[1], cached: blocks[2], reserved: blocks[3], in_transfer: blocks[4], quarantined: blocks[5],
            },
            running_sequences: counts.0, waiting_sequences: counts.1, waiting_tokens: counts.2,
            prefix_query_tokens_total: totals.0, prefix_hit_tokens_total: totals.1, preemptions_total: totals.2, computed_tokens_total: totals.3,
            pairs: pairs.into_iter().map(|(decode_node, unusable_reason, transport)| PairHealth { decode_node, unusable_reason, transport }).collect(),
        }
    }
}

fn node_report() -> impl Strategy<Value = NodeReport> {
    prop_oneof![
        record().prop_map(NodeReport::Register),
        (any::<u64>(), status()).prop_map(|(epoch, status)| NodeReport::Status {
            epoch: NodeEpoch(epoch),
            status
        }),
        "[ -~]{0,40}".prop_map(|reason| NodeReport::Leave { reason }),
        prop::collection::btree_set(any::<u64>().prop_map(PrefixKey), 0..9)
            .prop_map(|keys| NodeReport::Prefixes(PrefixReport::Whole(keys))),
        any::<(Vec<u64>, Vec<u64>)>().prop_map(|(listed, gone)| NodeReport::Prefixes(PrefixReport::Changes {
            listed: listed.into_iter().map(PrefixKey).collect(),
            gone: gone.into_iter().map(PrefixKey).collect(),
        })),
        any::<(i64, i64, u64)>().prop_map(|(monotonic_ns, unix_ns, error)| NodeReport::Clock(ClockOffset {
            monotonic_ns,
            unix_ns,
            error: Duration::from_nanos(error),
        })),
    ]
}

fn coordinator_report() -> impl Strategy<Value = CoordinatorReport> {
    let ms = || (1u64..86_400_000).prop_map(Duration::from_millis);
    let peer = (node(), label(), prop::collection::vec(label(), 0..3), compatibility()).prop_map(
        |(node, address, transports, compatibility)| Peer {
            node,
            address,
            transports,
            compatibility,
        },
    );
    prop_oneof![
        (node(), ms(), ms(), any::<bool>()).prop_map(|(coordinator, lease, status_interval, takes_prefixes)| {
            CoordinatorReport::Welcome(Welcome {
                coordinator,
                lease,
                status_interval,
                takes_prefixes,
            })
        }),
        ms().prop_map(|lease| CoordinatorReport::Renewed { lease }),
        prop::collection::vec(peer, 0..4).prop_map(CoordinatorReport::Peers),
        (select(RegisterRefusedReason::ALL), "[ -~]{0,40}")
            .prop_map(|(reason, detail)| CoordinatorReport::RegisterRefused { reason, detail }),
        ("[ -~]{0,40}", prop::option::of(assigned_role()))
            .prop_map(|(reason, next_role)| CoordinatorReport::Drain { reason, next_role }),
        any::<(u64, u64, u64)>().prop_map(|(wanted, waited_ns, returned_total)| {
            CoordinatorReport::Permits(PermitNote {
                wanted,
                waited: Duration::from_nanos(waited_ns),
                returned_total,
            })
        }),
    ]
}

fn kv_frame() -> impl Strategy<Value = KvFrame> {
    let transfer = || any::<u128>().prop_map(TransferId);
    let hello = (node(), node(), any::<u32>(), compatibility(), kv_shard());
    let hello = hello.prop_map(|(from, to, protocol_version, compatibility, shard)| {
        KvFrame::Hello(Hello {
            from,
            to,
            protocol_version,
            compatibility,
            shard,
        })
    });
    let data = prop::collection::vec(any::<u8>(), 0..200);
    let block = (transfer(), any::<[u32; 4]>(), 0u32..100, 1u32..100, any::<u64>(), data).prop_map(
        |(transfer, numbers, layer_begin, layers, checksum, data)| {
            KvFrame::Block(KvBlockFrame {
                transfer,
                sequence_no: numbers[0],
                ticket_index: numbers[1],
                block: BlockId(numbers[2]),
                generation: Generation(numbers[3]),
                layer_begin,
                layer_end: layer_begin + layers,
                checksum,
                data: Bytes::from(data),
            })
        },
    );
    let last = (transfer(), any::<u128>(), any::<[u32; 3]>(), token_events()).prop_map(
        |(transfer, request, numbers, first_tokens)| {
            KvFrame::Last(LastFrame {
                transfer,
                request: RequestId(request),
                attempt: Attempt(numbers[0]),
                block_count: numbers[1],
                frame_count: numbers[2],
                first_tokens,
                traceparent: (numbers[2] % 2 == 0)
                    .then(|| "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".to_owned()),
                cached_tokens: (numbers[1] % 2 == 0).then_some(numbers[0]),
            })
        },
    );
    prop_oneof![
        hello,
        transfer().prop_map(|transfer| KvFrame::Begin { transfer }),
        block,
        last,
        (transfer(), label()).prop_map(|(transfer, reason)| KvFrame::Abort { transfer, reason }),
    ]
}

fn kv_reply() -> impl Strategy<Value = KvReply> {
    let transfer = || any::<u128>().prop_map(TransferId);
    prop_oneof![
        (
            node(),
            option::of(hello_refused()),
            prop::collection::vec(transport_offer(), 0..3)
        )
            .prop_map(|(node, refused, offers)| { KvReply::Hello(HelloReply { node, refused, offers }) }),
        transfer().prop_map(|transfer| KvReply::Ack { transfer }),
        (transfer(), label(), "[ -~]{0,40}").prop_map(|(transfer, reason, detail)| KvReply::Refused {
            transfer,
            reason,
            detail
        }),
        (transfer(), label()).prop_map(|(transfer, reason)| KvReply::Aborted { transfer, reason }),
    ]
}

fn hello_refused() -> impl Strategy<Value = HelloRefused> {
    let reason = select(HelloRefusedReason::ALL.to_vec());
    (reason, "[ -~]{0,40}").prop_map(|(reason, detail)| HelloRefused { reason, detail })
}

fn transport_offer() -> impl Strategy<Value = TransportOffer> {
    (label(), prop::collection::vec(any::<u8>(), 0..40)).prop_map(|(transport, offer)| TransportOffer {
        transport,
        offer: offer.into(),
    })
}

fn kv_shard() -> impl Strategy<Value = KvShard> {
    (any::<u32>(), any::<u32>(), option::of(any::<(u32, u32)>())).prop_map(|(rank, rank_count, heads)| KvShard {
        rank,
        rank_count,
        heads: heads.map(|(begin, end)| begin..end),
    })
}

fn staged_frame() -> impl Strategy<Value = StagedFrame> {
    prop_oneof![9 => staged_block_or_control(), 1 => Just(StagedFrame::Goodbye)]
}

fn staged_block_or_control() -> impl Strategy<Value = StagedFrame> {
    (kv_frame(), any::<[u32; 2]>()).prop_map(|(frame, [slot, data_bytes])| match frame {
        KvFrame::Block(header) => StagedFrame::Block(StagedBlock {
            header: KvBlockFrame {
                data: Bytes::new(),
                ..header
            },
            slot,
            data_bytes,
        }),
        frame => StagedFrame::Control(frame),
    })
}

fn staged_reply() -> impl Strategy<Value = StagedReply> {
    prop_oneof![
        kv_reply().prop_map(StagedReply::Reply),
        any::<u32>().prop_map(StagedReply::ReturnedSlot),
        any::<u128>().prop_map(|transfer| StagedReply::Begun(TransferId(transfer))),
    ]
}

macro_rules! round_trips {
    ($($test:ident: $strategy:ident as $name:ident;)*) => { proptest! { $(
        #[test]
        fn $test(message in $strategy()) {
            let bytes = v1::$name::from(message.clone()).encode_to_vec();
            let wire = v1::$name::decode(bytes.as_slice()).unwrap();
            prop_assert_eq!($name::try_from(wire).unwrap(), message);
        }
    )* } };
}

round_trips! {
    open: open_request as OpenRequest;
    prefill: prefill_request as PrefillRequest;
    decode_events: decode_event as DecodeEvent;
    prefill_events: prefill_event as PrefillEvent;
    node_reports: node_report as NodeReport;
    coordinator_reports: coordinator_report as CoordinatorReport;
    kv_frames: kv_frame as KvFrame;
    kv_replies: kv_reply as KvReply;
    staged_frames: staged_frame as StagedFrame;
    staged_replies: staged_reply as StagedReply;
}

#[test]
fn a_stop_string_has_no_wire_form() {
    let event = TokenEvent {
        choice: ChoiceIndex(0),
        index: OutputIndex(0),
        token: TokenId(1),
        logprobs: None,
        finish: Some(FinishReason::StopString),
    };
    let error = TokenEvent::try_from(v1::TokenEvent::from(event)).unwrap_err();
    assert_eq!(error.field(), "token.finish.kind");
}

#[test]
fn versions_next_to_each_other_understand_the_stages() {
    let ms = Duration::from_millis;
    let timings = StageTimings(vec![(Stage::StepWait, ms(40)), (Stage::PrefillQueue, ms(2))]);
    let mut wire = v1::StageTimings::from(timings.clone());
    let names: Vec<_> = wire
        .stages
        .iter()
        .map(|stage| (stage.stage.as_str(), stage.duration_ns))
        .collect();
    assert_eq!(
        names,
        [("prefill_queue", 42_000_000)],
        "an older reader has the right sum"
    );
    wire.stages.push(v1::StageTiming {
        stage: "stage_of_next_year".to_owned(),
        before_first_token: true,
        duration_ns: 7,
    });
    assert_eq!(StageTimings::try_from(wire), Ok(timings), "a newer stage is left out");
}
