//! gRPC calls to one etcd endpoint: the method paths, the token of a user, and the two streams.
//!
//! etcd closes a connection that pings more often than every 5 s. The connection is made with the first call, so nothing
//! here fails because nobody listens.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::uri::PathAndQuery;
use prost::Message;
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::client::Grpc;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;

use crate::address::Credentials;
use crate::messages::{
    AuthenticateRequest, AuthenticateResponse, Empty, LeaseGrantRequest, LeaseId, LeaseResponse, RangeRequest,
    RangeResponse, TxnRequest, TxnResponse, WatchCreateRequest, WatchRequest, WatchResponse,
};

/// etcd closes connections that ping more often than its `--grpc-keepalive-min-time`, which is 5 s by default. This is
/// twice that.
const PING_INTERVAL: Duration = Duration::from_secs(10);
/// The limit for answers to lists and for watch messages, which etcd splits (`fragment`) at about 2 MiB.
const MESSAGE_BYTES_MAX: usize = 64 << 20;
/// Questions for a sign of life that a stalled connection may hold back.
const WATCH_REQUESTS_MAX: usize = 100;
const AUTHENTICATE: &str = "/etcdserverpb.Auth/Authenticate";
const WATCH: &str = "/etcdserverpb.Watch/Watch";

/// Clones share the connection and the token.
#[derive(Clone)]
pub(crate) struct Client {
    channel: Channel,
    credentials: Option<Credentials>,
    token: Arc<Mutex<Option<MetadataValue<Ascii>>>>,
}

/// Where and as whom a client calls.
pub(crate) struct ClientOptions<'a> {
    pub url: &'a str,
    pub call_limit: Duration,
    pub tls: Option<ClientTlsConfig>,
    pub credentials: Option<Credentials>,
}

/// One watch, which is one stream in both directions.
pub(crate) struct Watch {
    requests: mpsc::Sender<WatchRequest>,
    answers: Streaming<WatchResponse>,
}

impl Client {
    /// Calls etcd only if there are credentials: the token comes with the first call.
    pub(crate) async fn open(options: ClientOptions<'_>) -> Result<Self, Status> {
        let unusable = |error: tonic::transport::Error| Status::from_error(Box::new(error));
        let mut endpoint = Endpoint::from_shared(options.url.to_owned()).map_err(unusable)?;
        if let Some(tls) = options.tls {
            endpoint = endpoint.tls_config(tls).map_err(unusable)?;
        }
        let channel = endpoint
            .timeout(options.call_limit)
            .connect_timeout(options.call_limit)
            .http2_keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(options.call_limit)
            // etcd also takes pings without an open stream for an attack.
            .keep_alive_while_idle(false)
            .connect_lazy();
        let client = Self {
            channel,
            credentials: options.credentials,
            token: Arc::default(),
        };
        client.authenticate().await?;
        Ok(client)
    }

    pub(crate) async fn range(&self, request: RangeRequest) -> Result<RangeResponse, Status> {
        self.call("/etcdserverpb.KV/Range", request).await
    }

    pub(crate) async fn txn(&self, request: TxnRequest) -> Result<TxnResponse, Status> {
        self.call("/etcdserverpb.KV/Txn", request).await
    }

    pub(crate) async fn lease_grant(&self, ttl: i64) -> Result<LeaseResponse, Status> {
        self.call("/etcdserverpb.Lease/LeaseGrant", LeaseGrantRequest { ttl })
            .await
    }

    pub(crate) async fn lease_revoke(&self, id: i64) -> Result<(), Status> {
        self.call("/etcdserverpb.Lease/LeaseRevoke", LeaseId { id })
            .await
            .map(|Empty {}| ())
    }

    /// One question on a stream of its own, so there is no stream that could break between two renewals. The answer to a
    /// lease that is gone has `ttl` 0.
    pub(crate) async fn lease_keep_alive(&self, id: i64) -> Result<LeaseResponse, Status> {
        self.call("/etcdserverpb.Lease/LeaseKeepAlive", LeaseId { id }).await
    }

    pub(crate) async fn watch(&self, request: WatchCreateRequest) -> Result<Watch, Status> {
        let opened = self.watch_once(request.clone()).await;
        match self.has_new_token(&opened).await? {
            true => self.watch_once(request).await,
            false => opened,
        }
    }

    async fn watch_once(&self, request: WatchCreateRequest) -> Result<Watch, Status> {
        let (requests, sent) = mpsc::channel(WATCH_REQUESTS_MAX);
        let create = WatchRequest {
            create_request: Some(request),
            progress_request: None,
        };
        let sending = tokio_stream::once(create).chain(ReceiverStream::new(sent));
        let request = self.request(WATCH, sending);
        let (path, codec) = (PathAndQuery::from_static(WATCH), ProstCodec::default());
        let answers = self.ready().await?.streaming(request, path, codec).await?;
        Ok(Watch {
            requests,
            answers: answers.into_inner(),
        })
    }

    /// Sends one message and reads one. A call without a stream has the same bytes.
    async fn call<Q, A>(&self, path: &'static str, message: Q) -> Result<A, Status>
    where
        Q: Message + Clone + 'static,
        A: Message + Default + 'static,
    {
        let answer = self.call_once(path, message.clone()).await;
        match self.has_new_token(&answer).await? {
            true => self.call_once(path, message).await,
            false => answer,
        }
    }

    async fn call_once<Q, A>(&self, path: &'static str, message: Q) -> Result<A, Status>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let request = self.request(path, tokio_stream::once(message));
        let (path, codec) = (PathAndQuery::from_static(path), ProstCodec::default());
        let answer = self.ready().await?.client_streaming(request, path, codec).await;
        answer.map(tonic::Response::into_inner)
    }

    fn request<T>(&self, path: &'static str, messages: T) -> Request<T> {
        let mut request = Request::new(messages);
        let metadata = request.metadata_mut();
        // A member that is cut off from its cluster then ends its watches instead of staying silent.
        metadata.insert("hasleader", MetadataValue::from_static("true"));
        let token = self.token.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(token) = token.filter(|_| path != AUTHENTICATE) {
            metadata.insert("token", token);
        }
        request
    }

    async fn ready(&self) -> Result<Grpc<Channel>, Status> {
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX);
        let ready = grpc.ready().await;
        ready.map_err(|error| Status::from_error(Box::new(error)))?;
        Ok(grpc)
    }

    /// etcd forgets a token after some minutes, and all of them when it restarts. Then the user gets a new one, and the call
    /// can be made again.
    async fn has_new_token<A>(&self, answer: &Result<A, Status>) -> Result<bool, Status> {
        let is_refused = matches!(answer, Err(status) if status.code() == Code::Unauthenticated);
        if !is_refused || self.credentials.is_none() {
            return Ok(false);
        }
        self.authenticate().await?;
        Ok(true)
    }

    async fn authenticate(&self) -> Result<(), Status> {
        let Some(credentials) = &self.credentials else {
            return Ok(());
        };
        let request = AuthenticateRequest {
            name: credentials.user.clone(),
            password: credentials.password.clone(),
        };
        let answer: AuthenticateResponse = self.call_once(AUTHENTICATE, request).await?;
        let token = answer
            .token
            .parse()
            .map_err(|_| Status::internal("the token is no header"))?;
        *self.token.lock().unwrap_or_else(PoisonError::into_inner) = Some(token);
        Ok(())
    }
}

impl Watch {
    /// `None`: the stream has ended.
    pub(crate) async fn message(&mut self) -> Result<Option<WatchResponse>, Status> {
        self.answers.message().await
    }

    /// Asks for a sign of life.
    pub(crate) async fn request_progress(&self) -> Result<(), Status> {
        let request = WatchRequest {
            create_request: None,
            progress_request: Some(Empty {}),
        };
        let sent = self.requests.send(request).await;
        sent.map_err(|_| Status::unavailable("the stream takes no more requests"))
    }
}
