//! Status page `/`: the daemon's images, exports and logs in HTML.

mod render;

use axum::extract::{Query, State};
use axum::http::header;
use axum::response::{Html, IntoResponse, Response};
use serde::Deserialize;

use super::control::App;
use crate::engine::overview::PageNumbers;

/// Content security policy: the page loads nothing from elsewhere, and no content of a name is executed.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'";

/// Query for pages of the lists.
#[derive(Debug, Default, Deserialize)]
pub struct Wanted {
    /// Page of the images, from 1.
    page: Option<String>,
    /// Page of the exports, from 1.
    exports: Option<String>,
}

/// Handles a request for the page.
pub async fn page(State(app): State<App>, Query(wanted): Query<Wanted>) -> Response {
    // Typed by users; anything but a number selects the first page.
    let number = |text: Option<String>| text.and_then(|text| text.parse().ok()).unwrap_or(1);
    let numbers = PageNumbers { images: number(wanted.page), exports: number(wanted.exports) };
    match app.engine.call(async move |engine| engine.overview(numbers).await).await {
        Ok(overview) => {
            let headers = [
                (header::CONTENT_SECURITY_POLICY, POLICY),
                (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
                (header::REFERRER_POLICY, "no-referrer"),
                (header::CACHE_CONTROL, "no-store"),
            ];
            (headers, Html(render::render(&overview))).into_response()
        }
        Err(failure) => failure.into_response(),
    }
}
