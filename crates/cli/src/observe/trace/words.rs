//! A request in words: what it was, where the time to its first token went, its stalls, and why it was slow.

use coordinator::records::shape::{ClockShape, Detail, StageShape, StallShape, Summary};

use crate::observe::format::{bytes, clean, ms, ms_or_dash, wrap};
use crate::observe::look::Look;
use crate::observe::records::way;
use crate::terminal::Paint;

/// A request that stalls at each token would fill the screen.
const STALLS_MAX: usize = 20;
/// A request may have 128 prompts.
const PROMPTS_MAX: usize = 16;
/// Two figures that differ by less are shown as equal.
const SHOWN_ALIKE_MS: f64 = 0.05;

pub fn header(request: &Summary, trace_id: &str, look: Look) -> Vec<String> {
    let terminal = look.terminal;
    let id = if request.id.is_empty() {
        "without an id"
    } else {
        &request.id
    };
    let mut lines = vec![format!(
        "{} (seq {}, trace {})",
        terminal.paint(&format!("request {}", clean(id)), Paint::Bold),
        request.seq,
        clean(trace_id)
    )];
    for (parts, separator) in [(what(request), ", "), (place(request), "; ")] {
        let wrapped = wrap(&parts, separator, look.width.saturating_sub(2));
        lines.extend(wrapped.iter().map(|line| clean(&format!("  {line}"))));
    }
    let outcome = match (&request.outcome, request.status) {
        (Some(outcome), Some(status)) => format!("{outcome} ({status})"),
        (Some(outcome), None) => outcome.to_string(),
        (None, _) => format!("still {}, figures so far", request.state.name()),
    };
    let is_good = request.outcome.as_deref().is_none_or(|outcome| outcome == "ok");
    let paint = if is_good { Paint::Good } else { Paint::Bad };
    lines.push(format!(
        "  outcome {}   TTFT {} ms   ITL p50 {} ms, max {} ms   e2e {} ms",
        terminal.paint(&clean(&outcome), paint),
        ms_or_dash(request.ttft_ms),
        ms_or_dash(request.itl_p50_ms),
        ms_or_dash(request.itl_max_ms),
        ms(request.e2e_ms),
    ));
    if let Some(error) = &request.error {
        lines.push(format!(
            "  {}",
            terminal.paint(&format!("error: {}", clean(error)), Paint::Bad)
        ));
    }
    if !request.breached.is_empty() {
        let words = format!("SLO {} breached: {}", request.slo, request.breached.join(", "));
        lines.push(format!("  {}", terminal.paint(&clean(&words), Paint::Warn)));
    }
    lines
}

fn what(request: &Summary) -> Vec<String> {
    let mut parts = vec![format!("model {}", request.model.as_deref().unwrap_or("unknown"))];
    parts.extend((!request.lane.is_empty()).then(|| format!("lane {}", request.lane)));
    parts.extend((!request.endpoint.is_empty()).then(|| request.endpoint.to_string()));
    parts.push(
        if request.is_streaming {
            "streaming"
        } else {
            "not streaming"
        }
        .to_owned(),
    );
    let cached = match request.serving.cached_tokens {
        0 => String::new(),
        cached => format!(" ({cached} cached)"),
    };
    let (prompt, output) = (request.serving.prompt_tokens, request.serving.output_tokens);
    parts.push(format!("{prompt} prompt tokens{cached}, {output} output tokens"));
    parts
}

fn place(request: &Summary) -> Vec<String> {
    let mut parts = vec![format!("nodes {}", way(&request.serving))];
    if let Some(reason) = &request.serving.local_prefill {
        parts.push(format!("prefilled on the decode node: {reason}"));
    }
    if let Some(reason) = &request.serving.route_reason {
        parts.push(format!("chosen: {reason}"));
    }
    if let Some(transport) = &request.serving.transport {
        let within = request
            .serving
            .kv_transfer_ms
            .map(|took| format!(" in {} ms", ms(took)));
        parts.push(format!(
            "KV {} over {transport}{}",
            bytes(request.serving.kv_bytes),
            within.unwrap_or_default()
        ));
    }
    parts.extend((request.serving.attempts > 1).then(|| format!("{} attempts", request.serving.attempts)));
    let guessed = request.serving.drafted_tokens.zip(request.serving.accepted_tokens);
    parts.extend(guessed.map(|(drafted, accepted)| format!("guessed {drafted} tokens, {accepted} right")));
    parts.extend((request.serving.preemptions > 0).then(|| format!("preempted {} times", request.serving.preemptions)));
    parts
}

/// `parse 0.2 + tokenize 1.6 + ... = TTFT 281.0 ms, unattributed 0.1`.
pub fn stage_sum(request: &Detail, width: usize) -> Vec<String> {
    let to_first: Vec<&StageShape> = request.stages.iter().filter(|stage| stage.phase == "ttft").collect();
    let sum: f64 = to_first.iter().map(|stage| stage.ms).sum();
    let mut parts: Vec<String> = to_first
        .iter()
        .map(|stage| format!("{} {}", clean(&stage.stage), ms(stage.ms)))
        .collect();
    if parts.is_empty() {
        return vec!["To the first token: no stage is known".to_owned()];
    }
    let result = match request.summary.ttft_ms {
        None => format!(" = {} ms so far; no first token", ms(sum)),
        Some(ttft) => {
            let left = request.summary.unattributed_ms.unwrap_or(ttft - sum);
            let missing = ttft - sum - left;
            let check = if missing.abs() > SHOWN_ALIKE_MS {
                format!("; {} ms do not add up: a fault of the record", ms(missing))
            } else {
                String::new()
            };
            format!(" = TTFT {} ms, unattributed {}{check}", ms(ttft), ms(left))
        }
    };
    let mut lines = vec!["To the first token (ms):".to_owned()];
    if let Some(last) = parts.last_mut() {
        last.push_str(&result);
    }
    let indented = wrap(&parts, " + ", width.saturating_sub(2));
    lines.extend(indented.into_iter().map(|line| format!("  {line}")));
    let rest: Vec<String> = request
        .stages
        .iter()
        .filter(|stage| stage.phase != "ttft")
        .map(|stage| format!("{} {}", clean(&stage.stage), ms(stage.ms)))
        .collect();
    if !rest.is_empty() {
        lines.push("After it (ms; these overlap and sum to nothing):".to_owned());
        let rest = wrap(&rest, ", ", width.saturating_sub(2));
        lines.extend(rest.into_iter().map(|line| format!("  {line}")));
    }
    lines
}

pub fn stalls(request: &Detail) -> Vec<String> {
    let count = request.summary.stall_count;
    if request.stalls.is_empty() {
        let known = (count > 0).then(|| format!("Stalls: {count}, and the record says no more of them"));
        return known.into_iter().collect();
    }
    let mut lines = vec!["Stalls:".to_owned()];
    let is_one_choice = request.prompts.is_empty() && request.stalls.iter().all(|stall| stall.choice == 0);
    for stall in request.stalls.iter().take(STALLS_MAX) {
        let choice = if is_one_choice {
            String::new()
        } else {
            format!("choice {}, ", stall.choice)
        };
        lines.push(format!(
            "  {choice}token {} at {} ms: nothing for {} ms; {}",
            stall.token,
            ms(stall.at_ms),
            ms(stall.gap_ms),
            clean(&stall_words(stall))
        ));
    }
    lines.extend(left_out(request.stalls.len(), STALLS_MAX));
    lines
}

/// The server's words, with the name of the cause that counters and filters use.
fn stall_words(stall: &StallShape) -> String {
    let told = [&*stall.cause, &stall.words];
    let told: Vec<&str> = told.into_iter().filter(|text| !text.is_empty()).collect();
    if told.is_empty() {
        return "the cause is not known".to_owned();
    }
    told.join(": ")
}

/// The line below a list that was cut.
fn left_out(count: usize, shown_max: usize) -> Option<String> {
    let more = count.saturating_sub(shown_max);
    (more > 0).then(|| format!("  and {more} more; -o json has them"))
}

/// Where each of several prompts ran. The figures above are those of the prompt that the client heard of first.
pub fn prompts(request: &Detail) -> Vec<String> {
    if request.prompts.is_empty() {
        return Vec::new();
    }
    let mut lines = vec!["Prompts (the stages above are those of the first to give a token; ms):".to_owned()];
    for (at, prompt) in request.prompts.iter().enumerate().take(PROMPTS_MAX) {
        let stages: Vec<String> = prompt
            .stages
            .iter()
            .map(|stage| format!("{} {}", stage.stage, ms(stage.ms)))
            .collect();
        let transport = prompt.serving.transport.as_ref();
        let moved = transport.map(|transport| format!("; KV {} over {transport}", bytes(prompt.serving.kv_bytes)));
        let attempts = (prompt.serving.attempts > 1).then(|| format!("; {} attempts", prompt.serving.attempts));
        lines.push(clean(&format!(
            "  {at}: {} in, {} out, {}: {}{}{}",
            prompt.serving.prompt_tokens,
            prompt.serving.output_tokens,
            way(&prompt.serving),
            stages.join(", "),
            moved.unwrap_or_default(),
            attempts.unwrap_or_default(),
        )));
    }
    lines.extend(left_out(request.prompts.len(), PROMPTS_MAX));
    lines
}

pub fn failed_legs(request: &Detail) -> Vec<String> {
    let leg = |leg: &String| match leg.splitn(3, ':').collect::<Vec<_>>()[..] {
        [leg, node, cause] => format!("  the {leg} leg to {node} failed: {cause}"),
        _ => format!("  {leg}"),
    };
    if request.failed_legs.is_empty() {
        return Vec::new();
    }
    let legs = request.failed_legs.iter().map(|text| clean(&leg(text)));
    std::iter::once("Failed legs:".to_owned()).chain(legs).collect()
}

pub fn clocks(clocks: &[ClockShape]) -> Vec<String> {
    if clocks.is_empty() {
        return Vec::new();
    }
    let parts: Vec<String> = clocks
        .iter()
        .map(|clock| format!("{} {:+.2} ±{:.2}", clean(&clock.node), clock.offset_ms, clock.error_ms))
        .collect();
    vec![format!("Clocks against the coordinator's (ms): {}", parts.join(", "))]
}

pub fn slow_because(request: &Summary, look: Look) -> Vec<String> {
    let because = request.slow_because.iter();
    because
        .map(|because| {
            look.terminal
                .paint(&format!("Slow because {}", clean(because)), Paint::Bold)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use coordinator::records::shape::{PromptShape, Serving};

    fn request(stages: &[(&str, f64)], ttft_ms: Option<f64>) -> Detail {
        let stages = stages.iter().map(|(stage, ms)| StageShape {
            stage: (*stage).to_owned().into(),
            phase: if *stage == "decode" { "rest" } else { "ttft" }.into(),
            ms: *ms,
            process: None,
        });
        Detail {
            stages: stages.collect(),
            summary: Summary {
                ttft_ms,
                ..Summary::default()
            },
            ..Detail::default()
        }
    }

    /// The figures of a text, in order.
    fn figures(text: &str) -> Vec<f64> {
        let words = text.split(|c: char| c.is_whitespace() || c == ',' || c == ';');
        words.filter_map(|word| word.parse().ok()).collect()
    }

    #[test]
    fn each_of_several_prompts_has_a_line_and_a_screen_has_room_for_the_rest() {
        let prompt = PromptShape {
            serving: Serving {
                prompt_tokens: 12,
                output_tokens: 4,
                prefill_node: Some("prefill-1".to_owned()),
                decode_node: Some("decode-0".to_owned()),
                attempts: 2,
                transport: Some("grpc".to_owned()),
                kv_bytes: 2048,
                ..Serving::default()
            },
            stages: request(&[("prefill_forward", 70.5)], None).stages,
            ..PromptShape::default()
        };
        let several = Detail {
            prompts: vec![prompt; PROMPTS_MAX + 3],
            ..Detail::default()
        };
        let lines = prompts(&several);
        let second = "  1: 12 in, 4 out, prefill-1 > decode-0: prefill_forward 70.5; KV 2.0 kB over grpc; 2 attempts";
        assert_eq!(lines[2], second);
        assert_eq!(lines.last().map(String::as_str), Some("  and 3 more; -o json has them"));
        assert!(prompts(&Detail::default()).is_empty());
    }

    #[test]
    fn the_stages_and_what_is_left_sum_to_the_ttft() {
        let request = request(
            &[
                ("parse", 0.2),
                ("tokenize", 1.6),
                ("prefill_forward", 270.0),
                ("decode", 900.0),
            ],
            Some(281.0),
        );
        for width in [30, 200] {
            let lines = stage_sum(&request, width);
            let before_rest = lines.iter().take_while(|line| !line.starts_with("After"));
            let figures = figures(&before_rest.cloned().collect::<Vec<_>>().join(" "));
            let [stages @ .., ttft, unattributed] = figures.as_slice() else {
                panic!("{lines:?}");
            };
            assert_eq!((stages.len(), *ttft), (3, 281.0), "{lines:?}");
            assert!(
                (stages.iter().sum::<f64>() + unattributed - ttft).abs() < 0.2,
                "{lines:?}"
            );
            assert!(lines.last().expect("a line").contains("decode 900.0"));
        }
    }

    #[test]
    fn a_record_that_does_not_add_up_says_so() {
        let mut request = request(&[("parse", 1.0)], Some(5.0));
        request.summary.unattributed_ms = Some(4.0);
        let text = stage_sum(&request, 200).join("\n");
        request.summary.unattributed_ms = Some(0.0);
        let wrong = stage_sum(&request, 200).join("\n");
        assert!(
            wrong.len() > text.len() && wrong.contains("4.0 ms do not add up"),
            "{wrong}"
        );
        request.summary.ttft_ms = None;
        assert!(stage_sum(&request, 200).join("\n").contains("no first token"));
    }

    #[test]
    fn every_stall_has_words_and_a_long_list_says_how_many_more() {
        let stall = |cause: &str, words: &str| StallShape {
            cause: cause.to_owned().into(),
            words: words.to_owned(),
            ..StallShape::default()
        };
        let mut request = Detail {
            stalls: vec![
                stall("network", ""),
                stall("new_cause", ""),
                stall("", ""),
                stall("a", "b"),
            ],
            ..Detail::default()
        };
        assert!(stalls(&request).iter().all(|line| line.len() > 5));
        request.stalls = vec![stall("network", ""); 25];
        assert!(stalls(&request).last().expect("a line").contains("5 more"));
    }
}
