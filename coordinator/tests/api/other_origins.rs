//! Host names, origins and content types: who may use the API from a browser.

use serde_json::json;

use super::client::{Answer, get, post_with, request, send};
use super::harness::{CHOSEN_ORIGIN, MODEL, Server};

async fn complete(server: &Server, headers: &[(&str, &str)]) -> Answer {
    let body = json!({"model": MODEL, "prompt": "x"});
    post_with(server.address, "/v1/completions", &body, headers).await
}

fn code(answer: &Answer) -> String {
    answer.json()["error"]["code"].as_str().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn a_write_of_another_origin_never_reaches_a_handler() {
    let server = Server::saying("x").await;
    let own = format!("http://{}", server.address);
    let host = server.address.to_string();
    for headers in [
        [("origin", "http://127.0.0.1:1"), ("x-lane", "batch")],
        [("sec-fetch-site", "same-site"), ("x-lane", "batch")],
        [("origin", own.as_str()), ("sec-fetch-site", "cross-site")],
    ] {
        let answer = complete(&server, &headers).await;
        assert_eq!(
            (answer.status, code(&answer).as_str()),
            (403, "foreign_origin"),
            "{headers:?}"
        );
        assert!(
            !answer.headers.contains_key("access-control-allow-origin"),
            "{answer:?}"
        );
        assert!(
            !answer.header("x-request-id").is_empty(),
            "the operator finds it in the log"
        );
    }
    assert!(server.heard.lock().unwrap().requests.is_empty());
    let same = request_to(&host, &[("origin", &own), ("sec-fetch-site", "same-origin")]);
    assert_eq!(send(server.address, &same).await.status, 200, "the console");
    assert_eq!(complete(&server, &[]).await.status, 200, "curl and the SDKs");
}

fn request_to(host: &str, headers: &[(&str, &str)]) -> Vec<u8> {
    let body = json!({"model": MODEL, "prompt": "x"}).to_string();
    let bytes = request("POST", "/v1/completions", headers, body.as_bytes());
    let text = String::from_utf8(bytes).expect("text");
    text.replace("host: localhost", &format!("host: {host}")).into_bytes()
}

#[tokio::test]
async fn a_host_name_that_nobody_chose_is_not_answered() {
    let server = Server::saying("x").await;
    let answer = send(server.address, &request_to("rebound.test", &[])).await;
    assert_eq!((answer.status, code(&answer).as_str()), (403, "host_not_allowed"));
    for path in ["/health", "/ready", "/metrics"] {
        let head = format!("GET {path} HTTP/1.1\r\nhost: rebound.test\r\nconnection: close\r\n\r\n");
        assert_eq!(send(server.address, head.as_bytes()).await.status, 200, "{path}");
    }
}

#[tokio::test]
async fn a_body_that_is_not_json_is_not_read() {
    let server = Server::saying("x").await;
    for kind in ["text/plain", "application/x-www-form-urlencoded"] {
        let answer = complete(&server, &[("content-type", kind)]).await;
        assert_eq!((answer.status, code(&answer).as_str()), (415, "unsupported_media_type"));
    }
    let utf8 = [("content-type", "application/json; charset=utf-8")];
    assert_eq!(complete(&server, &utf8).await.status, 200);
}

#[tokio::test]
async fn the_pages_of_a_chosen_origin_may_ask_and_read() {
    let server = Server::saying("x").await;
    let preflight = |origin| {
        let asked = [
            ("origin", origin),
            ("access-control-request-method", "POST"),
            (
                "access-control-request-headers",
                "authorization,content-type,x-stainless-os",
            ),
        ];
        request("OPTIONS", "/v1/chat/completions", &asked, b"")
    };
    let answer = send(server.address, &preflight(CHOSEN_ORIGIN)).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("access-control-allow-origin"), CHOSEN_ORIGIN);
    assert!(answer.header("access-control-allow-methods").contains("POST"));
    assert!(answer.header("access-control-allow-headers").contains("x-stainless-os"));
    assert!(answer.header("vary").to_lowercase().contains("origin"));
    let answer = send(server.address, &preflight("https://other.example.com")).await;
    assert!(
        !answer.headers.contains_key("access-control-allow-origin"),
        "{answer:?}"
    );

    let headers = [("origin", CHOSEN_ORIGIN), ("sec-fetch-site", "cross-site")];
    let answer = complete(&server, &headers).await;
    assert_eq!(
        (answer.status, answer.header("access-control-allow-origin")),
        (200, CHOSEN_ORIGIN)
    );
    let exposed = answer.header("access-control-expose-headers");
    // OpenAI's client for JavaScript reads these two in a browser, too.
    for name in ["x-request-id", "retry-after-ms", "x-should-retry"] {
        assert!(exposed.contains(name), "{exposed}");
    }
    // A refusal can be read there, too.
    let answer = complete(&server, &[headers[0], headers[1], ("content-type", "text/plain")]).await;
    assert_eq!(
        (answer.status, answer.header("access-control-allow-origin")),
        (415, CHOSEN_ORIGIN)
    );
    assert!(
        !get(server.address, "/v1/models")
            .await
            .headers
            .contains_key("access-control-allow-origin")
    );
}
