//! The SLO profiles of a file judge requests; clients and pages have their names.

use std::sync::Arc;
use std::time::Duration;

use coordinator::{SloConfig, SloRules};
use serde_json::{Value, json};
use serving_core::request::Request;
use serving_core::stage::Stage;

use super::client::{PATIENCE, assert_refused, get, post, post_with};
use super::harness::{MODEL, Server};
use super::script::{Script, say};

/// No request is as quick as the first profile wants, and none as slow as the second one allows.
const FILE: &str = r#"
objective = 0.9

[[profile]]
name = "instant"
ttft_ms_max = 0.001
itl_ms_max = 600000

[[profile]]
name = "patient"
ttft_ms_max = 600000
itl_ms_max = 600000
"#;

async fn server() -> Server {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("slo.toml");
    std::fs::write(&file, FILE).unwrap();
    let config = SloConfig::load(&file).unwrap();
    let rules = SloRules::parse(config, &[]).unwrap();
    let play = |request: &Request| Script::Play(say(request, |_| "x".to_owned()));
    Server::start_with(play, |parts| {
        Arc::get_mut(&mut parts.insight).unwrap().slo_rules = rules;
    })
    .await
}

/// The page, once so many requests are in it.
async fn page_with(server: &Server, requests: u64) -> Value {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        let page = get(server.address, "/admin/slo").await.json();
        let profiles = page["profiles"].as_array().unwrap().iter();
        let lanes = profiles.flat_map(|profile| profile["lanes"].as_array().unwrap());
        let total: u64 = lanes.map(|lane| lane["total"].as_u64().unwrap()).sum();
        if total == requests {
            return page;
        }
        assert!(tokio::time::Instant::now() < deadline, "{page}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn the_profiles_of_a_file_judge_requests() {
    let server = server().await;
    let body = json!({"model": MODEL, "prompt": "hi"});
    post(server.address, "/v1/completions", &body).await;
    post_with(server.address, "/v1/completions", &body, &[("x-slo", "patient")]).await;
    let page = page_with(&server, 2).await;
    assert_eq!(page["objective"], 0.9);
    let of = |index: usize| {
        let profile = &page["profiles"][index];
        let lane = &profile["lanes"][0];
        let facts = [
            &profile["name"],
            &lane["total"],
            &lane["good"],
            &lane["breaches"]["ttft"],
        ];
        facts.map(Value::clone)
    };
    assert_eq!(of(0), [json!("instant"), json!(1), json!(0), json!(1)], "{page}");
    assert_eq!(of(1), [json!("patient"), json!(1), json!(1), json!(0)], "{page}");
    // One bad request of one, where one in ten may be bad.
    let burn = page["profiles"][0]["lanes"][0]["burn_5m"].as_f64().unwrap();
    assert!((burn - 10.0).abs() < 1e-6, "{page}");
    let records = get(server.address, "/admin/requests").await.text();
    assert!(records.contains(r#""slo":"instant""#), "{records}");
}

#[tokio::test]
async fn a_profile_that_the_file_does_not_have_is_refused_with_those_it_has() {
    let server = server().await;
    let body = json!({"model": MODEL, "prompt": "hi"});
    let answer = post_with(server.address, "/v1/completions", &body, &[("x-slo", "chat")]).await;
    let told = (answer.status, answer.json());
    assert_refused(&told, (&body, "x-slo", "instant, patient"));
}

#[tokio::test]
async fn each_part_of_the_budget_has_the_names_of_stages() {
    let server = server().await;
    let page = get(server.address, "/admin/slo").await.json();
    let known: Vec<&str> = Stage::ALL.iter().map(|stage| stage.name()).collect();
    let parts = page["stages"].as_array().unwrap();
    assert!(!parts.is_empty(), "{page}");
    for part in parts {
        let names = part["stage"].as_str().unwrap().split(" + ");
        for name in names {
            assert!(known.contains(&name), "{name} is no stage: {page}");
        }
    }
}
