//! The other endpoints.

use std::io::Write as _;

use serde_json::{Value, json};

use super::client::{get, post, request, send};
use super::harness::{MODEL, Server};
use super::script::Script;

#[tokio::test]
async fn models_are_listed_and_found() {
    let server = Server::saying("x").await;
    let list = get(server.address, "/v1/models").await.json();
    assert_eq!(list["object"], "list");
    assert_eq!(list["data"].as_array().map(Vec::len), Some(2));
    assert_eq!(list["data"][1]["id"], "org/alias");
    assert_eq!(list["data"][1]["root"], "own-name-of-tiny", "it is the same model");
    let model = &list["data"][0];
    assert_eq!(
        (&model["id"], &model["object"], &model["owned_by"]),
        (&json!(MODEL), &json!("model"), &json!("baton"))
    );
    assert_eq!(
        (&model["root"], &model["max_model_len"]),
        (&json!("own-name-of-tiny"), &json!(512))
    );
    assert!(model["created"].as_u64().unwrap() > 1_700_000_000);
    assert_eq!(
        model.get("parameter_count"),
        Some(&json!(null)),
        "unknown, and the key is there"
    );
    assert_eq!(
        get(server.address, "/v1/models/org/alias").await.json()["id"],
        "org/alias"
    );
    let missing = get(server.address, "/v1/models/gpt-9").await;
    assert_eq!(
        (missing.status, missing.json()["error"]["code"].as_str()),
        (404, Some("model_not_found"))
    );
}

#[tokio::test]
async fn text_to_ids_and_back() {
    let server = Server::saying("x").await;
    let body = json!({"model": MODEL, "prompt": "h€", "return_token_strs": true});
    let answer = post(server.address, "/tokenize", &body).await.json();
    assert_eq!(answer["tokens"], json!([104, 0xe2, 0x82, 0xac]));
    assert_eq!((&answer["count"], &answer["max_model_len"]), (&json!(4), &json!(512)));
    assert_eq!(answer["token_strs"][0], "h");
    let back = post(server.address, "/detokenize", &json!({"tokens": answer["tokens"]}))
        .await
        .json();
    assert_eq!(back, json!({"prompt": "h€"}));
    let messages = json!({"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": false});
    assert_eq!(post(server.address, "/tokenize", &messages).await.json()["count"], 7);
    assert_eq!(
        post(server.address, "/detokenize", &json!({"tokens": []})).await.json()["prompt"],
        ""
    );
    // Long texts take the other road to the same place.
    let long = json!({"prompt": "x".repeat(20_000)});
    assert_eq!(post(server.address, "/tokenize", &long).await.json()["count"], 20_000);
}

#[tokio::test]
async fn probes_and_metrics() {
    let server = Server::saying("x").await;
    for path in ["/health", "/ping", "/ready"] {
        assert_eq!(get(server.address, path).await.status, 200, "{path}");
    }
    assert!(get(server.address, "/version").await.json()["version"].is_string());
    let metrics = get(server.address, "/metrics").await;
    assert!(
        metrics
            .header("content-type")
            .starts_with("application/openmetrics-text")
    );
    assert_eq!(metrics.text(), "baton_test 1\n# EOF\n");
}

#[tokio::test]
async fn a_slash_at_the_end_changes_nothing_and_the_root_leads_to_the_console() {
    let server = Server::saying("x").await;
    for path in ["/v1/models/", "/health/", "/v1/models/tiny/", "/ui/"] {
        assert_eq!(get(server.address, path).await.status, 200, "{path}");
    }
    let body = json!({"model": MODEL, "prompt": "hi"});
    assert_eq!(post(server.address, "/v1/completions/", &body).await.status, 200);
    let root = get(server.address, "/").await;
    assert_eq!((root.status, root.header("location")), (303, "/ui"));
}

#[tokio::test]
async fn a_body_may_be_gzip_and_its_unpacked_size_counts() {
    let server = Server::saying("x").await;
    let packed = |text: &[u8]| {
        let mut writer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        writer.write_all(text).expect("memory takes it");
        writer.finish().expect("memory takes it")
    };
    let ask = async |body: &[u8], encoding: &str| {
        let headers = [("content-encoding", encoding), ("content-type", "application/json")];
        send(server.address, &request("POST", "/v1/completions", &headers, body)).await
    };
    let body = json!({"model": MODEL, "prompt": "hi"}).to_string();
    for name in ["gzip", "GZIP", "Gzip"] {
        assert_eq!(ask(&packed(body.as_bytes()), name).await.status, 200, "{name}");
    }
    for name in ["identity", "Identity"] {
        assert_eq!(ask(body.as_bytes(), name).await.status, 200, "{name}");
    }
    let bomb = packed(&vec![b' '; 64 << 20]);
    assert!(bomb.len() < 100_000);
    assert_eq!(ask(&bomb, "gzip").await.status, 413);
    let broken = ask(b"no gzip", "gzip").await;
    assert_eq!((broken.status, broken.text().contains("no valid gzip")), (400, true));
    let unknown = ask(body.as_bytes(), "br").await;
    assert_eq!(
        (unknown.status, &unknown.json()["error"]["code"]),
        (415, &json!("unsupported_encoding"))
    );
}

#[tokio::test]
async fn unknown_routes_and_methods_are_json_errors() {
    let server = Server::saying("x").await;
    let missing = get(server.address, "/v2/nothing").await;
    assert_eq!(missing.status, 404);
    assert!(
        missing.json()["error"]["message"]
            .as_str()
            .unwrap()
            .contains("/v2/nothing")
    );
    let wrong = get(server.address, "/v1/completions").await;
    assert_eq!(
        (wrong.status, wrong.json()["error"]["code"].as_str()),
        (405, Some("method_not_allowed"))
    );
    assert_eq!(wrong.header("allow"), "POST");
    let wrong = send(server.address, &request("DELETE", "/v1/models", &[], b"")).await;
    assert_eq!(wrong.status, 405);
}

#[tokio::test]
async fn reports_of_the_folder_are_listed_and_shown_without_scripts_and_nothing_else_is() {
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path().join("reports");
    std::fs::create_dir_all(folder.join("a b")).expect("made");
    std::fs::write(folder.join("a b").join("report.html"), "<p>figures</p>").expect("written");
    std::fs::write(dir.path().join("secret.html"), "secret").expect("written");
    let server = Server::start_with_reports(|_| Script::Play(Vec::new()), Some(folder)).await;
    let list = get(server.address, "/admin/reports").await.json();
    assert_eq!(
        (
            &list["is_enabled"],
            &list["reports"][0]["name"],
            &list["reports"][0]["bytes"]
        ),
        (&json!(true), &json!("a b"), &json!(14))
    );
    let report = get(server.address, "/admin/reports/a%20b").await;
    assert_eq!((report.status, report.text().as_str()), (200, "<p>figures</p>"));
    let policy = report.header("content-security-policy");
    assert!(
        policy.starts_with("sandbox;") && policy.contains("default-src 'none'"),
        "{policy}"
    );
    for name in [
        "none",
        "..%2Fsecret",
        "..",
        "%2Fetc%2Fpasswd",
        "a%20b%2Freport",
        "..%5Csecret",
        "%00",
    ] {
        let answer = get(server.address, &format!("/admin/reports/{name}")).await;
        assert!(
            answer.status == 404 || answer.status == 400,
            "{name}: {}",
            answer.status
        );
    }
}

#[tokio::test]
async fn without_a_folder_there_are_no_reports() {
    let server = Server::saying("x").await;
    let list = get(server.address, "/admin/reports").await.json();
    assert_eq!((&list["is_enabled"], &list["reports"]), (&json!(false), &json!([])));
    assert_eq!(get(server.address, "/admin/reports/x").await.status, 404);
}

#[tokio::test]
async fn the_rates_of_the_last_hour_have_each_request_once_it_has_ended() {
    let server = Server::saying("hello").await;
    let before = get(server.address, "/admin/rates").await.json();
    assert_eq!(
        (&before["slot_s"], &before["hour"]["requests"]),
        (&json!(30), &json!(0))
    );
    for name in ["requests_per_s", "output_tokens_per_s", "error_share", "ttft_p99_ms"] {
        assert!(before["hour"].get(name).is_some_and(Value::is_null), "{name}: {before}");
    }
    let body = json!({"model": MODEL, "prompt": "hi"});
    assert_eq!(post(server.address, "/v1/completions", &body).await.status, 200);
    let deadline = tokio::time::Instant::now() + super::client::PATIENCE;
    let after = loop {
        let page = get(server.address, "/admin/rates").await.json();
        if page["hour"]["requests"] == 1 {
            break page;
        }
        assert!(tokio::time::Instant::now() < deadline, "{page}");
    };
    let newest = after["slots"]
        .as_array()
        .and_then(|slots| slots.last())
        .expect("the open one");
    for rates in [newest, &after["hour"]] {
        assert_eq!(
            (&rates["error_share"], &rates["ttft_count"]),
            (&json!(0.0), &json!(1)),
            "{rates}"
        );
        assert!(rates["itl_count"].as_u64() > Some(3), "{rates}");
        assert!(rates["output_tokens_per_s"].as_f64() > Some(0.0), "{rates}");
    }
}

#[tokio::test]
async fn every_path_of_the_document_is_there() {
    let server = Server::saying("x").await;
    let document = get(server.address, "/openapi.json").await.json();
    assert!(!document["info"]["version"].as_str().unwrap().is_empty());
    let paths = document["paths"].as_object().unwrap();
    assert!(paths.len() > 20, "{} paths", paths.len());
    for (path, methods) in paths {
        // A stream of events has no end.
        if path == "/admin/events" {
            continue;
        }
        let real = path.replace("{role}", "decode").replace(['{', '}'], "");
        for method in methods.as_object().unwrap().keys() {
            let raw = request(&method.to_uppercase(), &real, &[], b"{}");
            let answer = send(server.address, &raw).await;
            let code = answer.json_or_null()["error"]["code"].clone();
            assert!(
                code != "unknown_url" && code != "method_not_allowed",
                "{method} {path}: {}",
                answer.text()
            );
        }
    }
}
