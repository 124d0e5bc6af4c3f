//! Events and actions as one line of text each, for people who look for the place where something went wrong.

use std::fmt::Debug;

use serving_core::cluster::{ClusterAction, ClusterEvent, DropCause, LegEvent};
use serving_core::ids::NodeId;
use serving_core::request::Request;

/// A node's whole list of prefixes would fill the screen.
const LINE_CHARS_MAX: usize = 600;

/// The name by which events are counted.
pub(super) fn kind(event: &ClusterEvent) -> &'static str {
    match event {
        ClusterEvent::RequestArrived { .. } => "request arrived",
        ClusterEvent::ClientGone { .. } => "client gone",
        ClusterEvent::ChoiceFinished { .. } => "choice finished",
        ClusterEvent::StreamBroken { .. } => "stream broken",
        ClusterEvent::AttemptEnded { .. } => "attempt ended",
        ClusterEvent::Leg { event, .. } => kind_of_leg(event),
        ClusterEvent::NodeJoined { .. } => "node joined",
        ClusterEvent::NodeReported { .. } => "node reported",
        ClusterEvent::PrefixesReported { .. } => "prefixes reported",
        ClusterEvent::NodeDisconnected { .. } => "node disconnected",
        ClusterEvent::NodeLeft { .. } => "node left",
        ClusterEvent::DrainNode { .. } => "drain of a node",
        ClusterEvent::DrainStarted => "drain of the coordinator",
        ClusterEvent::StoodStill { .. } => "coordinator stood still",
        ClusterEvent::Tick => "tick",
        ClusterEvent::TokensCounted { .. } => "tokens counted",
    }
}

fn kind_of_leg(event: &LegEvent) -> &'static str {
    match event {
        LegEvent::Opened { .. } => "leg opened",
        LegEvent::PrefillAccepted => "prefill accepted",
        LegEvent::FirstToken { .. } => "first token",
        LegEvent::Committed => "committed",
        LegEvent::TokensDelivered { .. } => "tokens delivered",
        LegEvent::PrefillFinished { .. } => "prefill finished",
        LegEvent::DecodeFinished => "decode finished",
        LegEvent::Refused { .. } => "leg refused",
        LegEvent::Failed { .. } => "leg failed",
    }
}

/// A fault that the event itself tells of.
pub(super) fn is_fault(event: &ClusterEvent) -> bool {
    matches!(
        event,
        ClusterEvent::StreamBroken { .. }
            | ClusterEvent::NodeDisconnected { .. }
            | ClusterEvent::StoodStill { .. }
            | ClusterEvent::Leg {
                event: LegEvent::Failed { .. },
                ..
            }
    )
}

/// A fault that shows only in what follows from an event: a node fell silent until its lease ran out, or came back as another life.
pub(super) fn is_loss(action: &ClusterAction) -> bool {
    matches!(
        action,
        ClusterAction::DropNode {
            cause: DropCause::LeaseExpired | DropCause::Restarted,
            ..
        }
    )
}

pub(super) fn event(event: &ClusterEvent) -> String {
    match event {
        ClusterEvent::RequestArrived { request } => format!("RequestArrived {{ {} }}", outline(request)),
        ClusterEvent::AttemptEnded { key, delivered } => format!(
            "AttemptEnded {{ {}/{}, tokens: {}, is_complete: {} }}",
            key.request, key.attempt, delivered.token_count, delivered.is_complete
        ),
        event => cut(event),
    }
}

pub(super) fn action(action: &ClusterAction) -> String {
    match action {
        ClusterAction::Place { key, placement } => format!(
            "Place {{ request {}, attempt {}, prefill: {}, decode: {}, local: {:?}, because {}, queued for {:?} }}",
            key.request,
            key.attempt,
            node(placement.prefill.as_ref()),
            node(placement.decode.as_ref()),
            placement.local,
            placement.route_reason,
            placement.queued_for
        ),
        ClusterAction::StartOpen {
            key,
            request,
            decode,
            prefill,
            local,
            permit_blocks,
            time_left,
        } => format!(
            "StartOpen {{ attempt {}, {}, decode: {}, prefill: {}, local: {local:?}, permit_blocks: {permit_blocks}, time_left: {time_left:?} }}",
            key.attempt,
            outline(request),
            decode.node,
            node(prefill.as_ref())
        ),
        ClusterAction::StartPrefill {
            key,
            request,
            prefill,
            ticket,
            permit_tokens,
            time_left,
        } => format!(
            "StartPrefill {{ attempt {}, {}, prefill: {}, transfer: {}, permit_tokens: {permit_tokens}, time_left: {time_left:?} }}",
            key.attempt,
            outline(request),
            prefill.node,
            ticket
                .as_ref()
                .map_or("none".to_owned(), |ticket| ticket.transfer.label()),
        ),
        action => cut(action),
    }
}

fn node(node: Option<&NodeId>) -> String {
    node.map_or("none".to_owned(), NodeId::to_string)
}

fn outline(request: &Request) -> String {
    format!(
        "request {}, {} prompt tokens, at most {} more, {} lane",
        request.id,
        request.prompt_tokens(),
        request.stop.max_tokens,
        request.lane.name()
    )
}

fn cut(value: &impl Debug) -> String {
    let text = format!("{value:?}");
    match text.char_indices().nth(LINE_CHARS_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
