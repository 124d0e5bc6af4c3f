//! The figures of the design's BENCH page, asked for as a user asks for them.

use clap::Parser;
use serde_json::Value;

use super::*;
use crate::args::{Cli, Command};

fn plan(line: &str) -> anyhow::Result<Sheet> {
    let words = ["baton", "plan"].into_iter().chain(line.split_whitespace());
    let cli = Cli::try_parse_from(words)?;
    let Command::Plan(args) = cli.command else {
        panic!("not a plan: {line}");
    };
    sheet_of(&args.what)
}

fn page(line: &str) -> Value {
    let sheet = plan(line).unwrap_or_else(|error| panic!("{line}: {error:#}"));
    serde_json::from_str(&sheet.json()).expect("JSON")
}

fn shown(line: &str) -> String {
    plan(line)
        .unwrap_or_else(|error| panic!("{line}: {error:#}"))
        .text(Terminal::plain())
}

/// The numbers of one column of a table.
fn column(page: &Value, table: &str, key: &str) -> Vec<f64> {
    let rows = page["tables"][table].as_array().expect("a table");
    rows.iter().map(|row| row[key].as_f64().unwrap_or(f64::NAN)).collect()
}

#[test]
fn servers_have_the_figures_of_the_source() {
    assert_eq!(
        page("littles-law --rps 1000 --latency-ms 40")["results"]["in_system"],
        40
    );
    let replicas = page("replicas --rps 200 --max-num-seqs 64 --latency-ms 4000");
    assert_eq!(
        (
            &replicas["results"]["rate_each_per_s"],
            &replicas["results"]["replicas"]
        ),
        (&16.into(), &13.into())
    );
    let instances = page("instances --rps 1000 --service-ms 40 --slo-ms 400");
    assert_eq!(
        (&instances["results"]["needed"], &instances["results"]["planned"]),
        (&58.into(), &60.into())
    );
    let text = shown("instances --rps 1000 --service-ms 40");
    assert!(text.contains("69.0 %") && text.contains("66.7 %"), "{text}");
    assert!(
        text.contains("M/M/1") && text.contains("M/M/c") && text.contains("80 ms"),
        "{text}"
    );
    let h200 = page("instances --rps 1000 --rps-per-instance 27");
    assert_eq!(
        (&h200["results"]["needed"], &h200["results"]["planned"]),
        (&38.into(), &40.into())
    );
    let exact = page("instances --rps 1000 --service-ms 40 --round-to 1");
    assert_eq!(exact["results"]["planned"], 58);
}

#[test]
fn tightness_and_cost_have_the_figures_of_the_source() {
    let slo = page("slo --rps 1000 --service-ms 40 --slo-ms 400 --price 1.69");
    assert_eq!(column(&slo, "limits", "planned"), [73.0, 64.0, 60.0, 54.0]);
    let text = shown("slo --rps 1000 --service-ms 40 --slo-ms 400 --price 1.69");
    for month in ["$88,826", "$77,875", "$73,008", "$65,707"] {
        assert!(text.contains(month), "{text}");
    }
    let text =
        shown("cost --instances 60 --price 1.69 --against-instances 40 --against-price 1.89 --off-peak-instances 14");
    for figure in ["$73,008", "$54,432", "-25.4 %", "$101.40", "$23.66"] {
        assert!(text.contains(figure), "{figure}: {text}");
    }
    let points = page("concurrency --limit-ms 300 --points 8:45:90,16:52:160,32:68:280,64:95:480");
    let add = (&points["results"]["add_from"], &points["results"]["add_to"]);
    assert_eq!(add, (&24.into(), &28.into()));
}

#[test]
fn devices_have_the_figures_of_the_source_and_its_correction() {
    let line = "prefill --params-billion 70 --prompt-tokens 512 --peak-sparse-tflops 3958 --memory-gb 80";
    let text = shown(line);
    for figure in [
        "71.68 TFLOP",
        "72.44 ms",
        "36.22 ms",
        "70 GB",
        "10 GB",
        "1,979 TFLOPS",
        "warning",
    ] {
        assert!(text.contains(figure), "{figure}: {text}");
    }
    let dense = page("prefill --params-billion 70 --prompt-tokens 512 --peak-dense-tflops 1979");
    assert_eq!(dense["results"]["prefill_ms"], page(line)["results"]["prefill_ms"]);
    assert_eq!(dense["warnings"], serde_json::json!([]));
    let trap = page("prefill --params-billion 70 --prompt-tokens 512 --peak-dense-tflops 3958");
    assert_eq!(trap["warnings"].as_array().map(Vec::len), Some(1));
    let decode = page("decode --params-billion 8 --weight-bytes 2 --bandwidth-gb-s 600");
    assert_eq!(decode["results"]["tokens_per_s_each"], 37.5);
    assert_eq!(decode["results"]["step_ms"].as_f64().map(f64::round), Some(27.0));
}

#[test]
fn kv_is_that_of_the_architecture_page() {
    let typed = page("kv --layers 32 --kv-heads 8 --head-size 128 --prompt-tokens 2048 --link-gbit 10");
    assert_eq!(typed["results"]["kv_bytes_per_token"], 131_072);
    assert_eq!(
        column(&typed, "transfer", "own_link_ms"),
        column(&typed, "transfer", "link_10_gbit_ms")
    );
    assert_eq!(column(&typed, "transfer", "link_10_gbit_ms")[0].round(), 215.0);
    let smollm = model::ModelNumbers {
        name: "smollm2-135m".to_owned(),
        parameters: 134_515_008.0,
        layers: 30.0,
        kv_heads: 3.0,
        head_size: 64.0,
        attention_width: 576.0,
    };
    assert_eq!(smollm.kv_bytes_per_token(), Ok(23_040.0));
}

/// A recorded burst has lengths, and its rate is what the user says.
#[test]
fn a_trace_without_a_rate_takes_a_typed_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("burst.jsonl");
    let row = "{\"at_ns\":0,\"prompt_tokens\":64,\"output_tokens\":10}\n";
    std::fs::write(&path, format!("{{\"baton_trace\":1}}\n{}", row.repeat(3))).expect("written");
    let line = format!(
        "xpyd --trace {} --prefill-us-per-token 10000 --decode-us-per-token 100000",
        path.display()
    );
    let found = page(&format!("{line} --rps 10"));
    assert_eq!(found["inputs"]["rate_per_s"], 10);
    assert_eq!(found["results"]["decode_busy"], 10);
    let error = plan(&line).expect_err("no rate");
    assert!(format!("{error:#}").contains("--rps"), "{error:#}");
}

#[test]
fn pools_follow_a_trace_and_typed_loads() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("own.jsonl");
    let row = |at_s: u64, blocks: &str| {
        format!(
            "{{\"at_ns\":{},\"prompt_tokens\":64,\"output_tokens\":10,\"prefix_blocks\":[{blocks}]}}\n",
            at_s * 1_000_000_000
        )
    };
    let rows = row(0, "1,2,3,4") + &row(1, "1,2,5,6") + &row(2, "1,2,7,8") + &row(20, "9,10,11,12");
    std::fs::write(&path, format!("{{\"baton_trace\":1,\"block_tokens\":16}}\n{rows}")).expect("written");
    let costs = "--prefill-us-per-token 10000 --decode-us-per-token 100000 --nodes 6";
    let found = page(&format!("xpyd --trace {} {costs}", path.display()));
    // Three requests in the busiest ten seconds; four of sixteen blocks come again.
    assert_eq!(found["inputs"]["rate_per_s"], 0.3);
    assert_eq!(found["inputs"]["cached_share"], 0.25);
    assert_eq!(found["results"]["prefill_busy"], 0.144);
    assert_eq!(found["results"]["decode_busy"], 0.3);
    let typed = page(&format!(
        "xpyd --rps 10 --prompt-tokens 64 --output-tokens 10 --cached-share 0.25 {costs}"
    ));
    assert_eq!(typed["results"]["prefill_nodes"], 7, "4.8 / 0.7");
    assert_eq!(typed["results"]["decode_nodes"], 13, "10 / 0.8");
    let best: Vec<&Value> = typed["tables"]["splits"]
        .as_array()
        .expect("a table")
        .iter()
        .filter(|row| row["best"] == "best")
        .collect();
    assert_eq!(
        (&best[0]["prefill_nodes"], &best[0]["decode_nodes"]),
        (&2.into(), &4.into())
    );
}

#[test]
fn break_even_has_a_row_for_each_length_and_link() {
    let line = "breakeven --kv-bytes-per-token 131072 --prefill-us-per-token 100 --step-ms 10 --itl-ms-max 50 --no-chunks --prompt-tokens 256,2048";
    let found = page(line);
    assert_eq!(found["tables"]["prompt_by_link"].as_array().map(Vec::len), Some(12));
    let answers = |tokens: u64, link: &str| {
        let rows = found["tables"]["prompt_by_link"].as_array().expect("a table");
        let row = rows
            .iter()
            .find(|row| row["prompt_tokens"] == tokens && row["link"] == link);
        row.expect("a row")["answer"].as_str().unwrap_or_default().to_owned()
    };
    assert!(answers(256, "NVLink 4").starts_with("no need"));
    assert_eq!(answers(2048, "100 Gb/s"), "can pay");
    assert_eq!(column(&found, "prompt_lengths_that_can_pay", "from_tokens")[1], 401.0);
    let slow = page(
        "breakeven --kv-bytes-per-token 131072 --prefill-us-per-token 60 --step-ms 12 --itl-ms-max 30 --link-gbit 1 --prompt-tokens 2048",
    );
    let last = slow["tables"]["prompt_by_link"]
        .as_array()
        .and_then(|rows| rows.last())
        .expect("a row");
    assert_eq!(last["answer"], "no: the link is too slow");
}

#[test]
fn bad_inputs_are_usage_errors_of_one_type() {
    for line in [
        "littles-law --rps 0 --latency-ms 40",
        "littles-law --rps -1 --latency-ms 40",
        "littles-law --rps nan --latency-ms 40",
        "instances --rps 1000 --service-ms 40 --utilisation 1",
        "instances --rps 1000 --service-ms 40 --slo-ms 100",
        "instances --rps inf --service-ms 40",
        "slo --rps 1000 --service-ms 0",
        "cost --instances 0 --price 1.69",
        "cost --instances 60 --price -1",
        "prefill --params-billion 70 --prompt-tokens 512 --peak-dense-tflops 0",
        "prefill --params-billion 140 --prompt-tokens 512 --peak-dense-tflops 1979 --memory-gb 80",
        "prefill --params-billion 70 --prompt-tokens 512 --peak-dense-tflops 1979 --extra-percent -1",
        "decode --params-billion 8 --bandwidth-gb-s nan",
        "kv --layers 0 --kv-heads 8 --head-size 128",
        "kv --layers 1 --kv-heads 8 --head-size 128 --prompt-tokens -1",
        "xpyd --rps 10 --prompt-tokens 64 --output-tokens 10 --prefill-us-per-token 0 --decode-us-per-token 1",
        "xpyd --rps 10 --prompt-tokens 64 --output-tokens 10 --prefill-us-per-token 1 --decode-us-per-token 1 --cached-share 1",
        "breakeven --kv-bytes-per-token 0 --prefill-us-per-token 100 --step-ms 10",
        "breakeven --kv-bytes-per-token 1 --prefill-us-per-token 100 --step-ms 10 --chunk-tokens 0",
        "concurrency --limit-ms 300 --points 16:52:160,8:45:90",
    ] {
        let error = plan(line).expect_err(line);
        assert!(error.is::<PlanError>(), "{line}: {error:#}");
    }
}

#[test]
fn a_file_that_cannot_be_used_and_a_flag_that_needs_another_are_wrong_command_lines() {
    for line in [
        "xpyd --trace /no/such/file --prefill-us-per-token 1 --decode-us-per-token 1",
        "xpyd --rps 10 --prompt-tokens 64 --output-tokens 10 --costs /no/such/file",
        "breakeven --costs /no/such/file",
        "decode --params-billion 8 --bandwidth-gb-s 600 --context-tokens 10",
    ] {
        let error = plan(line).expect_err(line);
        assert_eq!(crate::exit::of(&error), Exit::Usage, "{line}: {error:#}");
    }
}

#[test]
fn steps_of_a_file_of_costs_are_refused_without_one() {
    let typed = "xpyd --rps 10 --prompt-tokens 64 --output-tokens 10 --prefill-us-per-token 1 --decode-us-per-token 1";
    assert!(plan(typed).is_ok());
    for flag in ["--batch 4", "--context-tokens 64", "--step-tokens 400"] {
        assert!(plan(&format!("{typed} {flag}")).is_err(), "{flag}");
    }
}

#[test]
fn every_plan_names_its_formula_and_has_the_same_keys() {
    for line in [
        "littles-law --rps 1 --latency-ms 1",
        "replicas --rps 1 --max-num-seqs 1 --latency-ms 1",
        "slo --rps 1 --service-ms 1",
        "cost --instances 1 --price 1",
        "decode --params-billion 1 --bandwidth-gb-s 1",
    ] {
        let page = page(line);
        assert_eq!(page["plan"], line.split(' ').next().unwrap_or_default());
        assert!(
            page["formula"].as_array().is_some_and(|lines| !lines.is_empty()),
            "{line}"
        );
    }
}

#[test]
fn a_file_of_costs_gives_the_times_and_a_typed_time_goes_before_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("costs.json");
    let costs = serde_json::json!({
        "name": "test", "origin": "typed in", "kv_bytes_per_token": 1000,
        "step": {"fixed_seconds": 0.004, "prefill_token_seconds": 0.0001, "prefill_pair_seconds": 0.0,
                 "decode_row_seconds": 0.001, "decode_context_token_seconds": 0.0, "draw_seconds": 0.0},
        "overheads": {"request_seconds": 0.0, "prompt_token_seconds": 0.0, "hop_seconds": 0.0, "hop_prompt_token_seconds": 0.0,
                      "egress_seconds": 0.0, "loop_seconds": 0.0, "commit_seconds": 0.0, "role_change_seconds": 0.0},
        "link": {"name": "10 Gb/s", "latency_seconds": 0.0, "bytes_per_second": 1.25e9, "is_streamed": true}
    });
    std::fs::write(&path, costs.to_string()).expect("written");
    let load = "xpyd --rps 10 --prompt-tokens 64 --output-tokens 10";
    let found = page(&format!(
        "{load} --costs {} --step-tokens 400 --batch 4",
        path.display()
    ));
    // 4 ms for the step and 400 x 0.1 ms; 4 ms and 4 x 1 ms for four sequences.
    assert_eq!(found["inputs"]["prefill_us_per_token"], 110);
    assert_eq!(found["inputs"]["decode_us_per_token"], 2000);
    let typed = page(&format!("{load} --costs {} --decode-us-per-token 7", path.display()));
    assert_eq!(typed["inputs"]["decode_us_per_token"], 7);
    let even = page(&format!("breakeven --costs {} --batch 4", path.display()));
    assert_eq!(
        (&even["inputs"]["step_ms"], &even["inputs"]["kv_bytes_per_token"]),
        (&8.into(), &1000.into())
    );
    std::fs::write(&path, "{}").expect("written");
    assert!(plan(&format!("{load} --costs {}", path.display())).is_err());
    assert!(plan(load).is_err(), "no times at all");
}
