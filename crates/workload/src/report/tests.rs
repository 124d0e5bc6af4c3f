//! The report as a whole: what hostile text may not do, what is never missing, and how large it may be.

use std::sync::OnceLock;
use std::time::Duration;

use crate::comparison::Comparison;
use crate::record::{LoopKind, Outcome};

use super::*;

/// Markup in the places where a name, a message or a path of somebody else stands.
const HOSTILE: &str = "</script><script>alert(1)</script>\"><img src=x onerror=alert(1)> & ' ` | \u{202e} \u{0}";

/// Made once: its verdicts take their time.
fn made_up() -> Comparison {
    static MADE: OnceLock<Comparison> = OnceLock::new();
    MADE.get_or_init(|| synthetic::comparison(1)).clone()
}

fn markdown_of(run: &Run) -> String {
    let frame = RunFrame {
        slo: synthetic::empty().slo,
        date: "2026-11-25".to_owned(),
        command: "baton bench run".to_owned(),
    };
    Report::of_run(run.clone(), frame).markdown()
}

fn hostile() -> Comparison {
    let mut comparison = made_up();
    let evil = || HOSTILE.to_owned();
    comparison.command = evil();
    comparison.date = evil();
    comparison.hypothesis = Some(evil());
    comparison.slo.name = evil();
    comparison.environment.insert(evil(), HOSTILE.into());
    comparison.fairness.same_trace = Some(evil());
    for arm in &mut comparison.arms {
        arm.name = format!("{}{HOSTILE}", arm.name);
        arm.topology = evil();
        arm.settings.insert(evil(), HOSTILE.into());
    }
    for shape in &mut comparison.shapes {
        (shape.name, shape.traffic, shape.trace_hash, shape.verdict) = (evil(), evil(), evil(), evil());
        for contrast in &mut shape.contrasts {
            (contrast.metric, contrast.baseline, contrast.candidate) = (evil(), evil(), evil());
        }
        for run in &mut shape.runs {
            run.arm = format!("{}{HOSTILE}", run.arm);
            run.run.environment.insert("model".to_owned(), HOSTILE.into());
            run.run.server.insert(
                evil(),
                crate::record::Usage {
                    memory_bytes_max: 1,
                    ..Default::default()
                },
            );
            for record in &mut run.run.records {
                record.id = evil();
                if let Some(server) = &mut record.server {
                    server.stages.push((evil(), 1.0));
                    server.local_prefill = Some(evil());
                }
            }
            run.run.records[10].outcome = Outcome::Failed { error: evil() };
        }
    }
    comparison
}

#[test]
fn outside_text_is_never_markup() {
    let html = Report::of_comparison(hostile()).html();
    let scripts = html.matches("<script").count();
    assert_eq!(scripts, 1, "the one with the data");
    assert_eq!(html.matches("</script").count(), 1);
    let (shown, _) = html.split_once("<script").expect("the data at the end");
    assert!(!html.contains("<img") && !shown.contains('\u{0}') && !shown.contains('\u{202e}'));
    // What the browser shows is what was written: the text is there, escaped.
    assert!(html.contains("&lt;/script&gt;&lt;script&gt;alert(1)"));
    let mut comparison = hostile();
    comparison.shapes.truncate(1);
    let report = Report::of_comparison(comparison);
    assert!(
        report
            .markdown()
            .lines()
            .all(|line| !line.contains("<img") || line.contains("\\<img") || line == HOSTILE)
    );
    assert!(report.csv().lines().count() > 1_000);
}

/// The text of the data element, as a program would read it.
fn data(html: &str) -> serde_json::Value {
    let (_, rest) = html.split_once("id=\"data\">").expect("a data element");
    let (text, _) = rest.split_once("</script>").expect("its end");
    serde_json::from_str(text).expect("JSON")
}

#[test]
fn the_data_inside_the_html_are_those_of_the_comparison() {
    let mut comparison = hostile();
    comparison.shapes.clear();
    let data = data(&Report::of_comparison(comparison.clone()).html());
    assert_eq!(data["comparison"]["arms"][0]["name"], comparison.arms[0].name.as_str());
}

#[test]
fn the_same_comparison_gives_the_same_bytes_and_can_be_read_again() {
    let mut comparison = made_up();
    comparison.shapes.remove(0);
    let report = Report::of_comparison(comparison);
    let again: Comparison = serde_json::from_str(&report.json().expect("JSON")).expect("a comparison");
    let again = Report::of_comparison(again);
    assert!(again.html() == report.html() && again.markdown() == report.markdown() && again.csv() == report.csv());
}

/// serde_json writes null for such a number, and null is no figure.
#[test]
fn a_figure_that_is_not_finite_is_an_error_and_no_json_that_cannot_be_read() {
    let mut comparison = made_up();
    comparison.shapes.remove(0);
    let spoils: [fn(&mut Comparison); 5] = [
        |comparison| comparison.slo.itl_ms_max = f64::INFINITY,
        |comparison| comparison.arms[0].tuning[0].goodput = f64::NAN,
        |comparison| comparison.shapes[0].contrasts[0].ratio_high = f64::INFINITY,
        |comparison| comparison.shapes[0].runs[0].run.offered = f64::NAN,
        |comparison| {
            let records = &mut comparison.shapes[0].runs[0].run.records;
            let server = records.iter_mut().find_map(|record| record.server.as_mut());
            server.expect("a record of a server").kv_transfer_ms = Some(f64::NAN);
        },
    ];
    for (at, spoil) in spoils.into_iter().enumerate() {
        let mut spoilt = comparison.clone();
        spoil(&mut spoilt);
        let made = Report::of_comparison(spoilt).json();
        assert!(matches!(made, Err(JsonError::NotFinite { .. })), "{at}: {made:?}");
    }
}

#[test]
fn a_missing_field_of_the_fairness_list_is_an_alert_and_forbids_the_verdict() {
    let mut comparison = made_up();
    comparison.shapes.remove(0);
    let verdict = comparison.shapes[0].verdict.clone();
    let with = Report::of_comparison(comparison.clone()).markdown();
    comparison.fairness.same_trace = None;
    let without = Report::of_comparison(comparison);
    let start: String = verdict
        .chars()
        .take_while(|c| c.is_ascii_alphanumeric() || *c == ' ')
        .collect();
    assert!(with.contains(&start) && !without.markdown().contains(&start));
    assert_eq!(
        without.html().matches("role=\"alert\"").count(),
        2,
        "made-up data, and the gap"
    );
}

#[test]
fn the_loads_of_the_report_are_those_of_the_verdict() {
    let mut comparison = made_up();
    comparison.shapes.truncate(1);
    let shape = &mut comparison.shapes[0];
    let rate = shape.runs[0].run.offered;
    shape.runs.retain(|run| run.run.offered == rate);
    // The first is 1 % above the others and counts as their load; the last is 3 % above them and does not.
    shape.runs[0].run.offered = rate * 1.01;
    let last = shape.runs.len() - 1;
    shape.runs[last].run.offered = rate * 1.03;
    let view = View::new(&comparison, Subject::Comparison);
    let offered: Vec<f64> = view.shapes[0].loads.iter().map(|load| load.offered).collect();
    assert_eq!(offered, crate::verdict::loads(&comparison.shapes[0]));
    assert_eq!(offered, [rate, rate * 1.03]);
}

#[test]
fn nothing_measured_makes_sentences_and_no_axis() {
    let mut comparison = synthetic::empty();
    let html = Report::of_comparison(comparison.clone()).html();
    assert!(!html.contains("class=\"axis\""), "no shape");
    let mut shape = made_up().shapes.remove(0);
    for run in &mut shape.runs {
        run.run.records.clear();
        run.run.measured = Duration::ZERO;
    }
    comparison.shapes = vec![shape];
    let html = Report::of_comparison(comparison.clone()).html();
    assert!(!html.contains("NaN") && !html.contains("inf"), "no run with a request");
    comparison.shapes[0].runs.clear();
    let html = Report::of_comparison(comparison).html();
    assert!(
        !html.contains("class=\"axis\"") && html.contains("class=\"empty\""),
        "no run"
    );
}

#[test]
fn a_single_run_is_called_one_and_has_no_verdict() {
    let mut run = made_up().shapes.remove(0).runs.remove(0).run;
    run.loop_kind = LoopKind::Simulated;
    let frame = RunFrame {
        slo: synthetic::empty().slo,
        date: "2026-11-25".to_owned(),
        command: "baton simulate".to_owned(),
    };
    let report = Report::of_run(run, frame);
    let markdown = report.markdown();
    assert!(markdown.starts_with("# One run, not a comparison"));
    assert!(markdown.contains("simulated"));
    assert!(!report.html().contains("role=\"alert\""));
}

#[test]
fn the_summary_says_how_many_requests_have_no_part_in_its_percentiles() {
    use crate::test_kit::{request, run};
    let summary_of = |run: &Run| {
        let markdown = markdown_of(run);
        let (summary, _) = markdown.split_once("## Verdict table").expect("the next section");
        summary.to_owned()
    };
    let mut half = run("a", vec![request(1, &[100, 120]), request(2, &[90, 110])]);
    assert!(summary_of(&half).contains("(1 run)"));
    half.records[0].outcome = Outcome::Refused { status: 429 };
    let summary = summary_of(&half);
    assert!(summary.contains("1 of 2 requests not answered"), "{summary}");
}

#[test]
fn a_run_that_was_stopped_early_says_what_it_lacks() {
    let mut run = made_up().shapes.remove(0).runs.remove(0).run;
    run.environment.insert("unfinished".to_owned(), 0.into());
    run.environment.insert("interrupted".to_owned(), false.into());
    assert!(!markdown_of(&run).contains("Stopped early"));
    run.environment.insert("unfinished".to_owned(), 17.into());
    run.environment.insert("interrupted".to_owned(), true.into());
    let markdown = markdown_of(&run);
    assert!(
        markdown.contains("Stopped early: 1 of the runs") && markdown.contains("17 requests"),
        "{markdown}"
    );
}

/// The names are those under which the load client and the simulator keep them.
#[test]
fn a_single_run_says_its_traffic_and_its_hypothesis() {
    let mut run = made_up().shapes.remove(0).runs.remove(0).run;
    let words = "chunks are the limit";
    run.environment
        .insert("trace".to_owned(), "prompts of 77 tokens".into());
    run.environment.insert("hypothesis".to_owned(), words.into());
    let markdown = markdown_of(&run);
    assert!(markdown.contains("Traffic: prompts of 77 tokens"), "{markdown}");
    assert!(
        markdown.contains(words) && !markdown.contains("nothing was predicted"),
        "{markdown}"
    );
}

#[test]
fn a_large_comparison_stays_within_three_megabytes() {
    let mut comparison = made_up();
    comparison.shapes.remove(0);
    for run in &mut comparison.shapes[0].runs {
        let records = run.run.records.clone();
        for _ in 0..10 {
            run.run.records.extend(records.iter().cloned());
        }
    }
    let html = Report::of_comparison(comparison).html();
    assert!(html.len() < 3_000_000, "{} bytes", html.len());
    assert!(data(&html)["left_out"].is_string());
}
